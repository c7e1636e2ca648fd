"""Makes training examples for the estimator: native/tools/estimator_examples.cc replays recorded rollouts.

A kind is a file of recordings. Some of its problems are held out and never used for training. The others are replayed
in the situations of a run:

* `history`: a response is generated again, and all earlier visits of all problems are known;
* `siblings`: the same, with the other responses of its group running beside it, token by token;
* `first visit`: a group runs side by side. Its problem is unknown, and only earlier groups are known.
"""

import itertools
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from histospec.replay import recordings
from histospec.replay.recordings import Problem, RecordedResponse, Turn

SITUATIONS = ("history", "siblings", "first visit")
TARGETS = 16  # how many responses of a visit are replayed
GROUP = 8  # how many responses run side by side
LONGEST_TARGET = 2000  # tokens
LONGEST_SIBLING = 600

EXAMPLE = np.dtype([("rows", "u1", 5), ("right", "u1"), ("tag", "<u2"), ("x", "<f4", 10)])  # as the tool writes it

NEW_NAMESPACE, INGEST, EXPLAIN, PLAY = range(4)  # commands of the tool

# A command is a list of integers and arrays of tokens.
Words = list["int | npt.NDArray[np.int32]"]


@dataclass(frozen=True)
class Split:
    """The problems of one kind of text: for training, and held out."""

    kind: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def split(path: Path, held_out: int) -> Split:
    """Splits the problems of a recording in a random order that depends on their number only; the first are held out.

    The order is that of `numpy.random.default_rng(1).permutation` over the problems with history before their last
    visit: those with earlier visits, or, if siblings count as history, with any other response. A problem that comes
    first in either order is held out.

    Raises:
        RecordingError: the file is not a recording.

    """
    with path.open("rb") as file:
        problems = [problem for problem in recordings.read(file) if len(problem.responses) > 1]
    revisited = [i for i, problem in enumerate(problems) if len(problem.epochs()) > 1]
    order = _shuffled(revisited)
    first = {*order[:held_out], *_shuffled(range(len(problems)))[:held_out]}
    return Split(
        path.name.partition(".")[0],
        tuple(problems[i] for i in order if i not in first),
        tuple(problems[i] for i in order if i in first),
    )


def _shuffled(numbers: Sequence[int]) -> list[int]:
    return [numbers[i] for i in np.random.default_rng(1).permutation(len(numbers))]


def examples(tool: Path, problems: Iterable[Problem], targets: int = TARGETS) -> npt.NDArray[np.void]:
    """Returns the examples from replaying these problems, as EXAMPLE[n]; tags are indices of SITUATIONS."""
    return replay(tool, _commands(tuple(problems), targets))


def replay(tool: Path, commands: Iterable[Words]) -> npt.NDArray[np.void]:
    """Returns the examples that the tool writes for these commands, as EXAMPLE[n]."""
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as out:
        _write(file, commands)
        file.seek(0)
        subprocess.run([tool], stdin=file, stdout=out, check=True)
        out.seek(0)
        return np.fromfile(out, EXAMPLE)


def _write(file: BinaryIO, commands: Iterable[Words]) -> None:
    for words in commands:
        file.writelines(np.atleast_1d(np.asarray(word, np.int32)).tobytes() for word in words)


def _commands(problems: tuple[Problem, ...], targets: int) -> Iterator[Words]:
    history, siblings, first_visit = range(len(SITUATIONS))
    yield [NEW_NAMESPACE]
    for number, problem in enumerate(problems):
        for epoch in problem.epochs()[:-1]:
            yield _ingest(number, problem, epoch)
    for number, problem in enumerate(problems):
        last = _visit(problem, problem.epochs()[-1])[:targets]
        for response in last:
            yield _explain(number, problem, history, [response.cut(LONGEST_TARGET)])
        for group in _groups(last):
            if len(group) > 1:
                yield _explain(number, problem, siblings, [response.cut(LONGEST_SIBLING) for response in group])
    yield [NEW_NAMESPACE]
    for number, problem in enumerate(problems):
        epoch = problem.epochs()[0]
        for group in _groups(_visit(problem, epoch)[:GROUP]):
            yield _explain(number, problem, first_visit, [response.cut(LONGEST_SIBLING) for response in group])
        yield _ingest(number, problem, epoch)


def _visit(problem: Problem, epoch: int) -> list[RecordedResponse]:
    return [response for response in problem.responses if response.epoch == epoch]


def _groups(responses: list[RecordedResponse]) -> Iterator[list[RecordedResponse]]:
    return (responses[i : i + GROUP] for i in range(0, len(responses), GROUP))


def _ingest(number: int, problem: Problem, epoch: int) -> Words:
    visit = _visit(problem, epoch)
    # The tool needs the order of epochs only.
    texts = itertools.chain.from_iterable([problem.epochs().index(epoch), *_text(response.turns)] for response in visit)
    return [INGEST, number, len(problem.prompt), problem.prompt, len(visit), *texts]


def _explain(number: int, problem: Problem, tag: int, targets: list[tuple[Turn, ...]]) -> Words:
    texts = itertools.chain.from_iterable(_text(turns) for turns in targets)
    return [EXPLAIN, number, len(problem.prompt), problem.prompt, len(targets), tag, *texts]


def _text(turns: tuple[Turn, ...]) -> Words:
    words: Words = [len(turns)]
    for turn in turns:
        words += [int(turn.generated), len(turn.tokens), turn.tokens]
    return words
