"""The engine against a naive model of what it promises, over random sequences of calls. Takes about 30 s.

The model keeps every response in a list. It does not know when segments are merged or built. If the engine may
choose when to forget responses outside the window of epochs, the model says which must be there and which may be.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from histospec.native import Engine

NAMES = ("red", "blue")
PROMPTS = ((1,), (1, 2), (2, 1, 3, 0) * 5)  # none long enough to be a later turn of another
IDS = (None, "turns")
EVICTED = ("evicted_by_memory", "evicted_by_epochs", "evicted_by_responses")
LATEST = 256  # lengths of a namespace that stand for those of a problem without any

Key = tuple[str | None, tuple[int, ...]]
Finished = tuple[tuple[int, ...], int]  # tokens, epoch
Place = tuple[str, tuple[int, ...], str | None]  # namespace, prompt, explicit id
Part = tuple[list[int], int]  # of a text: some tokens, how often
Verified = tuple[int, int, int]  # see REPORT
Share = tuple[int, bool, Part, int, Verified]  # of a step: see `shares`

REPORT = ("verified", "model_drafted", "model_accepted")  # what a worker with a drafter of its own says of each session


@dataclass
class Problem:
    finished: list[Finished] = field(default_factory=list)  # ever, since the namespace was dropped

    def required(self, epochs: int) -> Counter[Finished]:
        """Returns the responses of the newest epochs."""
        newest = sorted({epoch for _, epoch in self.finished})[-epochs:]
        return Counter(f for f in self.finished if f[1] in newest)


@dataclass
class ModelNamespace:
    problems: dict[Key, Problem] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    newest_epoch: int = 0
    added: int = 0
    dropped: int = 0
    emptied: bool = False  # dropped, with no response since
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))
    tokens: set[int] = field(default_factory=set)  # all tokens that a draft may have
    model: dict[str, int] = field(default_factory=lambda: {"draft_tokens": 0, "accepted_tokens": 0})

    def finish(self, key: Key, tokens: tuple[int, ...], epoch: int) -> None:
        self.problems.setdefault(key, Problem()).finished.append((tokens, epoch))
        self.emptied = False
        self.newest_epoch = max(self.newest_epoch, epoch)
        self.latest.append(len(tokens))
        self.tokens.update(tokens)
        self.added += 1


@dataclass
class Session:
    name: str
    key: Key
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    draft: tuple[int, ...] = ()
    asked: bool = False  # for a draft, since its last tokens came
    counted: bool = True  # the draft's tokens


# Most calls go to one problem, so that its history grows; the others must not appear in it.
MAIN = ("red", PROMPTS[1], None)
OTHERS = [(name, prompt, problem) for name in NAMES for prompt in PROMPTS for problem in IDS]
places = st.booleans().flatmap(lambda main: st.just(MAIN) if main else st.sampled_from(OTHERS))
epochs = st.integers(-1, 6)
# Small alphabets give repetitions; long texts fill the namespace index.
parts = st.tuples(st.lists(st.integers(0, 3), max_size=12), st.sampled_from((1, 1, 1, 1, 2, 9, 600)))
reports = st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 8)).map(lambda r: (*r[:2], min(r[1:])))
# Of one session in a step: whether it steps, whether its draft is accepted, its new tokens, its repeated tokens, and
# its verified counts.
shares = st.tuples(st.integers(0, 4), st.booleans(), parts, st.integers(0, 5), reports)


def microsteps(tokens: int, cost: float) -> int:
    """Returns what verifying tokens costs, in millionths of a step; the engine takes the cost as a float32."""
    return round(1e6 * float(np.float32(cost)) * tokens)


def text(name: str, part: Part) -> tuple[int, ...]:
    return shifted(name, part[0] * part[1])


def shifted(name: str, tokens: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    """The namespaces have disjoint tokens, so that a draft that mixes them is found."""
    return tuple(token + 1000 * NAMES.index(name) for token in tokens)


def agreeing(draft: tuple[int, ...], came: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(draft, came, strict=False)) if a != b), min(len(draft), len(came)))


class EngineMachine(RuleBasedStateMachine):
    met: ClassVar[Counter[str]] = Counter()  # over all runs: which cases the random calls have reached

    @initialize(window=st.integers(1, 3))
    def start(self, window: int) -> None:
        self.window = window
        self.engine = Engine(1 << 28, history_epochs=window)
        self.namespaces: dict[str, ModelNamespace] = {}
        self.sessions: dict[int, Session] = {}

    def namespace(self, name: str) -> ModelNamespace:
        return self.namespaces.setdefault(name, ModelNamespace())

    def key(self, name: str, prompt: tuple[int, ...], problem: str | None) -> Key:
        return (problem, () if problem else shifted(name, prompt))

    @rule(place=places, visits=st.lists(st.tuples(epochs, st.lists(parts, max_size=3)), min_size=1, max_size=6))
    def ingest(self, place: Place, visits: list[tuple[int, list[Part]]]) -> None:
        name, prompt, problem = place
        for epoch, responses in visits:
            tokens = [text(name, r) for r in responses]
            self.engine.ingest(name, shifted(name, prompt), tokens, epoch, problem=problem)
            for response in filter(None, tokens):
                self.namespace(name).finish(self.key(*place), response, epoch)
                self.namespace(name).tokens.update(shifted(name, prompt))

    @precondition(lambda self: len(self.sessions) < 12)
    @rule(place=places, generated=st.none() | parts)
    def open(self, place: Place, generated: Part | None) -> None:
        name, prompt, problem = place
        tokens = text(name, generated) if generated else ()
        namespace_, key = self.namespace(name), self.key(*place)
        number = self.engine.open(name, shifted(name, prompt), problem=problem, generated=tokens or None)
        assert number not in self.sessions
        self.sessions[number] = Session(name, key, shifted(name, prompt), tokens)
        known = namespace_.problems.setdefault(key, Problem()).finished
        namespace_.counters["lookups_hit" if known else "lookups_miss"] += 1
        namespace_.tokens.update(shifted(name, prompt), tokens)

    @rule(
        share=st.lists(shares, min_size=12, max_size=12),
        positioned=st.booleans(),
        max_tokens=st.sampled_from((0, 1, 4, 16)),
        cost=st.sampled_from((0.0, 0.05, 0.2, 1.0)),
        unreported=st.booleans(),
    )
    def step(self, share: list[Share], positioned: bool, max_tokens: int, cost: float, unreported: bool) -> None:
        batch, came, positions, verified = [], [], [], []
        for (number, session), (taking, accepting, part, again, report) in zip(
            self.sessions.items(), share, strict=False
        ):
            if not taking:
                continue
            fresh = (session.draft if accepting else ()) + text(session.name, part)
            repeated = min(again, len(session.generated)) if positioned else 0
            positions.append(len(session.generated) - repeated)
            came.append(session.generated[positions[-1] :] + fresh)
            batch.append(number)
            namespace_ = self.namespaces[session.name]
            namespace_.tokens.update(fresh)
            verified.append(report)
            if fresh:
                server, drafted, model_accepted = (len(session.draft), 0, 0) if unreported else report
                accepted = min(server, agreeing(session.draft, fresh))
                model_accepted = min(model_accepted, len(fresh) - accepted)
                namespace_.counters["draft_tokens"] += 0 if session.counted else min(server, len(session.draft))
                priced = drafted + (0 if session.counted else min(server, len(session.draft)))
                namespace_.counters["verify_microsteps"] += microsteps(priced, cost)
                namespace_.counters["accepted_tokens"] += accepted
                namespace_.counters["generated_tokens"] += len(fresh)
                namespace_.model["draft_tokens"] += drafted
                namespace_.model["accepted_tokens"] += model_accepted
                self.met["model tokens"] += model_accepted
                # The first token comes with the prompt, and a draft was asked for one step. The others had none.
                steps = len(fresh) - accepted - model_accepted
                covered = 1 if session.asked or not session.generated else 0
                namespace_.counters["undrafted_tokens"] += max(0, steps - covered)
                session.generated += fresh
                session.draft, session.asked = (), False
        tokens, offsets, probs = self.engine.step(
            np.array(batch, np.int64),
            np.array([*chain.from_iterable(came)], np.int32),
            np.array([0, *accumulate(map(len, came))], np.int64),
            max_tokens,
            cost,
            positions=np.array(positions, np.int64) if positioned else None,
            **({} if unreported else dict(zip(REPORT, np.array(verified, np.int32).reshape(-1, 3).T, strict=True))),
        )
        assert ((probs > 0) & (probs < 1)).all()
        assert (offsets[0], offsets[-1], len(offsets)) == (0, len(tokens), len(batch) + 1)
        for number, start, end in zip(batch, offsets, offsets[1:], strict=False):
            session = self.sessions[number]
            namespace_ = self.namespaces[session.name]
            draft = tuple(tokens[start:end].tolist())
            assert len(draft) <= (max_tokens if cost < 1 else 0)
            assert set(draft) <= namespace_.tokens
            if max_tokens > 0:
                session.draft, session.asked = draft, True
                namespace_.counters["drafts_hit" if draft else "drafts_empty"] += 1
                session.counted = unreported
                namespace_.counters["draft_tokens"] += len(draft) if session.counted else 0
                namespace_.counters["verify_microsteps"] += microsteps(len(draft), cost) if session.counted else 0

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 11), commit=st.booleans(), epoch=st.none() | epochs)
    def close(self, which: int, commit: bool, epoch: int | None) -> None:
        number = [*self.sessions][which % len(self.sessions)]
        session = self.sessions.pop(number)
        namespace_ = self.namespaces[session.name]
        self.engine.close(number, commit, epoch=epoch)
        if commit and session.generated:
            namespace_.finish(session.key, session.generated, namespace_.newest_epoch if epoch is None else epoch)
        if namespace_.emptied and not any(
            (s.name, s.key) == (session.name, session.key) for s in self.sessions.values()
        ):
            del namespace_.problems[session.key]
            if not namespace_.problems:
                del self.namespaces[session.name]

    @precondition(lambda self: self.namespaces)
    @rule(name=st.sampled_from(NAMES))
    def drop_namespace(self, name: str) -> None:
        forgotten = self.engine.drop_namespace(name)
        namespace_ = self.namespace(name)
        assert sum(p.required(self.window).total() for p in namespace_.problems.values()) <= forgotten
        namespace_.dropped += forgotten
        namespace_.emptied = True
        running = [s for s in self.sessions.values() if s.name == name]
        namespace_.problems = {key: Problem() for key in namespace_.problems if any(s.key == key for s in running)}
        namespace_.newest_epoch = 0
        namespace_.latest.clear()
        namespace_.tokens = set(chain.from_iterable(s.prompt + s.generated for s in running))
        if not namespace_.problems:
            del self.namespaces[name]  # with its counters

    @rule()
    def settle(self) -> None:
        self.engine.wait_until_built()

    @rule(
        place=places,
        longer=st.sampled_from((-1, 0, 3, 8, 30, 10_000)),
        quantiles=st.lists(st.floats(0, 1), max_size=4),
    )
    def predict_length(self, place: Place, longer: int, quantiles: list[float]) -> None:
        name, prompt, problem = place
        self.engine.wait_until_built()  # so that nothing is evicted between the two calls
        own = [len(t) for t, _ in self.engine.history(name, shifted(name, prompt), problem=problem)]
        namespace_ = self.namespaces.get(name, ModelNamespace())
        lengths = [n for n in own if n > longer] or [n for n in namespace_.latest if n > longer]
        predicted, observations = self.engine.predict_length(
            name, shifted(name, prompt), longer, quantiles, problem=problem
        )
        assert observations == len(lengths)
        self.met["lengths of its own"] += any(n > longer for n in own)
        self.met["lengths of others"] += len(lengths) > 0 and not any(n > longer for n in own)
        np.testing.assert_allclose(predicted, np.quantile(lengths, quantiles) if lengths else [])

    @invariant()
    def sessions_are_as_they_were_fed(self) -> None:
        self.engine.check_integrity()
        expected = [len(s.generated) for s in self.sessions.values()]
        assert self.engine.lengths(np.array([0, *self.sessions], np.int64)).tolist() == [-1, *expected]
        for number, session in self.sessions.items():
            assert tuple(self.engine.generated(number).tolist()) == session.generated

    @invariant()
    def history_holds_the_window_and_nothing_else(self) -> None:
        for name in NAMES:
            for prompt in PROMPTS:
                for problem in IDS:
                    key = self.key(name, prompt, problem)
                    known = self.namespace_or_empty(name).problems.get(key, Problem())
                    found = self.engine.history(name, shifted(name, prompt), problem=problem)
                    history = Counter((tuple(tokens.tolist()), epoch) for tokens, epoch in found)
                    required = known.required(self.window)
                    assert required <= history <= Counter(known.finished)

    @invariant()
    def counters_are_exact(self) -> None:
        stats = self.engine.stats()
        assert stats["sessions"] == len(self.sessions)
        assert stats["namespaces"].keys() == self.namespaces.keys()
        for name, namespace_ in self.namespaces.items():
            counted: dict[str, Any] = dict(stats["namespaces"][name])
            held, evicted = counted.pop("history_responses"), sum(counted.pop(reason) for reason in EVICTED)
            assert held + evicted + namespace_.dropped == namespace_.added
            tokens = counted.pop("history_tokens")
            assert (tokens > 0) == (held > 0)
            assert tokens <= sum(len(t) for p in namespace_.problems.values() for t, _ in p.finished)
            assert counted.pop("problems") == len(namespace_.problems)
            assert counted.pop("sessions") == sum(s.name == name for s in self.sessions.values())
            assert counted.pop("newest_epoch") == namespace_.newest_epoch
            assert counted.pop("bytes") > 0
            sources, ages = dict(counted.pop("sources")), counted.pop("ages")
            model = sources.pop("model")
            for count in ("draft_tokens", "accepted_tokens"):
                assert sum(source[count] for source in sources.values()) == counted[count]
                assert sum(age[count] for age in ages.values()) == sources["history"][count]
            assert model == namespace_.model
            assert counted.pop("misnamed_lookups") <= counted["lookups_miss"]  # test_misnamed says which ones
            assert {k: v for k, v in counted.items() if v} == {k: v for k, v in namespace_.counters.items() if v}

    def namespace_or_empty(self, name: str) -> ModelNamespace:
        return self.namespaces.get(name, ModelNamespace())

    def teardown(self) -> None:
        """An engine from which everything was dropped holds nothing."""
        if not hasattr(self, "engine"):
            return
        for stats in self.engine.stats()["namespaces"].values():
            self.met.update({name: count for name, count in stats.items() if isinstance(count, int)})
        for number in self.sessions:
            self.engine.close(number)
        for name in NAMES:
            self.engine.drop_namespace(name)
        self.engine.wait_until_built()
        self.engine.check_integrity()
        assert self.engine.memory_bytes() == Engine(1 << 28).memory_bytes()
        assert self.engine.stats()["namespaces"] == {}


def test_the_engine_does_what_the_model_does() -> None:
    quick = settings(max_examples=150, stateful_step_count=40, derandomize=True, database=None)
    EngineMachine.met.clear()
    run_state_machine_as_test(EngineMachine, settings=quick)
    reached = (
        "lookups_hit",
        "model tokens",
        "draft_tokens",
        "accepted_tokens",
        "undrafted_tokens",
        "evicted_by_epochs",
    )
    for what in (*reached, "lengths of its own", "lengths of others"):
        assert EngineMachine.met[what] > 0, f"the calls never led to: {what}"
