"""Makes rollouts with coupled sampling, on which the starting weights of the foresight are trained.

The noise of recorded rollouts is unknown, so they do not serve. This module makes two kinds of text. Both are sampled
as the coupled sampler does, with a fresh seed for every response. Their noise is that of places, or that of positions,
as in vLLM's model runner V2:

* `demo`: the policy of examples/tiny_rl, which GRPO improves from epoch to epoch;
* `forks`: texts that go on from fork to fork. The number of alternatives, their probabilities, how much these depend on
  what came before, how fast they move, and the lengths of texts differ from problem to problem.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from examples.tiny_rl import grpo, policy, task
from histospec.client.vllm.coupled import noise
from histospec.client.vllm.coupled.alternatives import Weighed, words
from histospec.client.vllm.coupled.places import WORD
from histospec.protocol.alternatives import ABSENT, MOST, groups_of, joined
from tests.support.position_noise import position_noise

EPOCHS, PROBLEMS, SAMPLES = 12, 24, 8  # of the demo
FORK_EPOCHS, FORK_PROBLEMS = 8, 60
VOCABULARY = 1024  # tokens of texts with forks
SEED_BITS = 62
LONGEST = 300  # tokens of a text with forks


@dataclass
class Group:
    """The responses to one problem in one epoch."""

    problem: int
    prompt: list[int]
    responses: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    alternatives: list[bytes] = field(default_factory=list)
    """Of each response, as `histospec.protocol.alternatives` packs them."""


Epoch = list[Group]


class Weights:
    """The alternatives of some texts, as the sampler weighs their tokens."""

    def __init__(self, texts: int) -> None:
        self._rows: list[list[list[int]]] = [[] for _ in range(texts)]

    def push(self, text: int, row: list[int] | None) -> None:
        """Appends a token to a text, with its row of `alternatives.words`; None: the policy was sure of it."""
        self._rows[text].append(row or [0, *[ABSENT] * MOST])

    def packed(self) -> list[bytes]:
        """Returns the alternatives of each text."""
        rows = [np.array(text, np.uint32) for text in self._rows]
        return [joined(*groups_of(text[:, 0].astype(np.uint8), text[:, 1:])) for text in rows]


class Places:
    """The places of some texts, which start with their prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._pairs = [[-1, -1] for _ in prompts]
        self._seen: list[dict[int, int]] = [{} for _ in prompts]
        for i, prompt in enumerate(prompts):
            for token in prompt:
                self.push(i, token)

    def weigh(self, logits: torch.Tensor, texts: list[int], seeds: list[int]) -> Weighed:
        """Samples the next token of some texts, one row each."""
        pairs, times = (torch.tensor(part) for part in zip(*map(self.next, texts), strict=True))
        return noise.weigh(logits, torch.arange(len(texts)), torch.tensor(seeds), pairs, times)

    def next(self, text: int) -> tuple[int, int]:
        """Returns the pair before the next token of a text, and how often it occurred."""
        before, last = self._pairs[text]
        pair = before << 32 | last & WORD
        return pair, self._seen[text].get(pair, 0)

    def push(self, text: int, token: int) -> None:
        """Appends a token to a text."""
        pair, times = self.next(text)
        self._seen[text][pair] = times + 1
        self._pairs[text] = [self._pairs[text][1], token]


class Positions:
    """The positions of some texts, which start with their prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._newest = [len(prompt) - 1 for prompt in prompts]

    def weigh(self, logits: torch.Tensor, texts: list[int], seeds: list[int]) -> Weighed:
        """Samples the next token of some texts, one row each."""
        where = [self._newest[text] for text in texts]
        drawn = position_noise(np.array(seeds)[:, None], np.array(where)[:, None], np.arange(logits.shape[1]))
        return noise.weighed(logits, torch.from_numpy(drawn).float())

    def push(self, text: int, token: int) -> None:
        """Appends a token to a text."""
        self._newest[text] += 1


Noise = type[Places] | type[Positions]


def demo(seed: int, epochs: int = EPOCHS, kind: Noise = Places) -> Iterator[Epoch]:
    """Yields the epochs of a run of GRPO on the demo's problems."""
    torch.manual_seed(seed)
    rng = random.Random(10_000 + seed)
    problems = task.problems(PROBLEMS, random.Random(seed))
    repeated = [problem.prompt for problem in problems for _ in range(SAMPLES)]
    model = policy.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for epoch in range(epochs):
        seeds = [rng.getrandbits(SEED_BITS) for _ in repeated]
        with torch.inference_mode():
            responses, alternatives = _respond(model.eval(), repeated, seeds, kind)
        groups = []
        for i, problem in enumerate(problems):
            own = slice(i * SAMPLES, (i + 1) * SAMPLES)
            groups.append(Group(i, problem.prompt, responses[own], seeds[own], alternatives[own]))
        yield groups
        if epoch + 1 < epochs:
            rewards = [[problems[group.problem].reward(r) for r in group.responses] for group in groups]
            grpo.update(model, optimizer, repeated, responses, torch.tensor(rewards))


def _respond(
    model: torch.nn.Module, prompts: list[list[int]], seeds: list[int], kind: Noise
) -> tuple[list[list[int]], list[bytes]]:
    """Returns a response to each prompt, and its alternatives; all prompts have the same length."""
    places, weights, running = kind(prompts), Weights(len(prompts)), list(range(len(prompts)))
    responses: list[list[int]] = [[] for _ in prompts]
    tokens, cache = torch.tensor(prompts), None
    for _ in range(task.LONGEST):
        done = model(tokens, past_key_values=cache, use_cache=True)
        cache = done.past_key_values
        weighed = places.weigh(done.logits[:, -1].float(), running, [seeds[i] for i in running])
        chosen = weighed.tokens
        for i, token, row in zip(running, chosen.tolist(), words(weighed).tolist(), strict=True):
            responses[i].append(token)
            weights.push(i, row)
            places.push(i, token)
        going = (chosen != task.END_ID).nonzero().flatten()
        if not len(going):
            break
        running = [running[row] for row in going]
        cache.batch_select_indices(going)
        tokens = chosen[going, None]
    return responses, weights.packed()


class Maze:
    """A problem whose texts go from node to node: a node is some tokens, and a fork to other nodes."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        """Draws the nodes and their forks."""
        nodes = int(rng.integers(4, 40))
        self.number = number
        self.prompt = [number % VOCABULARY, *rng.integers(0, VOCABULARY, int(rng.integers(1, 30))).tolist()]
        self.samples = int(rng.choice([2, 4, 8, 16]))
        self.longest = int(rng.integers(15, LONGEST))
        length = rng.uniform(1, 20)
        self.texts = [rng.integers(0, VOCABULARY, int(rng.geometric(1 / length))).tolist() for _ in range(nodes)]
        self.ways: list[list[int]] = []
        self.logits = []
        evenness, branching = np.exp(rng.uniform(-1.2, 1.2)), rng.uniform(0.2, 1)
        for node in range(nodes):
            many = int(rng.integers(2, 7)) if rng.random() < branching else 1
            ahead = rng.permutation(nodes)[:many] if rng.random() < 0.3 else node + 1 + rng.permutation(6)[:many]
            self.ways.append([int(way) % nodes for way in ahead])
            self.logits.append(np.log(rng.dirichlet([evenness] * len(ahead)) + 1e-4))
        self.by_origin = rng.normal(0, rng.uniform(0, 2), (nodes, nodes, 6))  # [node, node before, way]
        self.drift, self.surprise = rng.uniform(0, 0.4), rng.choice([0, 0.01, 0.05])

    def move(self, rng: np.random.Generator) -> None:
        """Moves the policy to the next epoch."""
        self.logits = [1.03 * logits + rng.normal(0, self.drift, len(logits)) for logits in self.logits]

    def logits_at(self, node: int, before: int) -> np.ndarray:
        """Returns the log-probability of each first token behind a node, up to a constant: float32[VOCABULARY]."""
        ways = self.ways[node]
        scores = self.logits[node] + self.by_origin[node, before, : len(ways)]
        share = np.exp(scores - scores.max())
        odds = np.full(VOCABULARY, self.surprise / VOCABULARY)
        np.add.at(odds, [self.texts[way][0] for way in ways], (1 - self.surprise) * share / share.sum())
        return np.asarray(np.log(np.maximum(odds, 1e-30)), np.float32)


@dataclass
class _Walk:
    maze: Maze
    seed: int
    node: int = 0
    before: int = 0
    at: int = 0
    said: list[int] = field(default_factory=list)


def forks(seed: int, epochs: int = FORK_EPOCHS, problems: int = FORK_PROBLEMS, kind: Noise = Places) -> Iterator[Epoch]:
    """Yields the epochs of texts with forks."""
    rng = np.random.default_rng(seed)
    mazes = [Maze(number, rng) for number in range(problems)]
    for _ in range(epochs):
        walks = [_Walk(maze, int(rng.integers(1 << SEED_BITS))) for maze in mazes for _ in range(maze.samples)]
        places, weights = kind([walk.maze.prompt for walk in walks]), Weights(len(walks))
        running = list(range(len(walks)))
        while running:
            chosen = _forked(walks, running, places)
            for i, (token, row) in zip(running, chosen, strict=True):
                walks[i].said.append(token)
                weights.push(i, row)
                places.push(i, token)
            running = [i for i in running if len(walks[i].said) < walks[i].maze.longest]
        groups = {maze.number: Group(maze.number, maze.prompt) for maze in mazes}
        for walk, alternatives in zip(walks, weights.packed(), strict=True):
            groups[walk.maze.number].responses.append(walk.said)
            groups[walk.maze.number].seeds.append(walk.seed)
            groups[walk.maze.number].alternatives.append(alternatives)
        yield list(groups.values())
        for maze in mazes:
            maze.move(rng)


def _forked(all_of: list[_Walk], running: list[int], places: Places | Positions) -> list[tuple[int, list[int] | None]]:
    """Returns the next token of each running walk, with its weights at a fork, and moves the walks."""
    walks = [all_of[i] for i in running]
    at_fork = [i for i, walk in enumerate(walks) if walk.at == len(walk.maze.texts[walk.node])]
    next_: dict[int, tuple[int, list[int] | None]] = {}
    if at_fork:
        logits = np.stack([walks[i].maze.logits_at(walks[i].node, walks[i].before) for i in at_fork])
        texts, seeds = [running[i] for i in at_fork], [walks[i].seed for i in at_fork]
        weighed = places.weigh(torch.from_numpy(logits), texts, seeds)
        next_ = dict(zip(at_fork, zip(weighed.tokens.tolist(), words(weighed).tolist(), strict=True), strict=True))
    for i, (token, _) in next_.items():
        walk = walks[i]
        to = [way for way in walk.maze.ways[walk.node] if walk.maze.texts[way][0] == token]
        walk.before, walk.node = walk.node, to[0] if to else walk.maze.ways[walk.node][0]
        walk.at = 1 if to else 0  # a surprise is followed by the first way
    for i, walk in enumerate(walks):
        if i not in next_:
            next_[i] = walk.maze.texts[walk.node][walk.at], None
            walk.at += 1
    return [next_[i] for i in range(len(walks))]
