"""Reading recorded rollouts: what is accepted, and how a bad record is reported."""

import gzip
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.replay.recordings import Problem, Recording, RecordingError, opened, read, source
from histospec.replay.recordings.source import GZIP_MAGIC
from histospec.replay.recordings.text import Text
from histospec.server.errors import ConfigError

GOOD = {"id": "a", "prompt": [7, 8], "responses": [{"epoch": 0, "group": 0, "tokens": [1, 2, 3]}]}
ZIPPED = gzip.compress(json.dumps(GOOD).encode(), mtime=0)  # the same in every process that collects tests


def load(*records: object) -> list[Problem]:
    return list(read(io.BytesIO("\n".join(json.dumps(record) for record in records).encode())))


def test_a_record_becomes_arrays_and_unknown_fields_are_ignored() -> None:
    (problem,) = load({**GOOD, "reward": [0.5]})
    assert problem.prompt.dtype == np.int32
    assert problem.prompt.tolist() == [7, 8]
    assert problem.responses[0].flat().tolist() == [1, 2, 3]
    assert problem.epochs() == [0]


def test_id_and_group_may_be_left_out_and_blank_lines_are_skipped() -> None:
    line = json.dumps({"prompt": [1], "responses": [{"epoch": 4, "tokens": [2]}]})
    problems = list(read(io.BytesIO(f"{line}\n\n  \n{line}\n".encode())))
    assert [problem.responses[0].group for problem in problems] == [None, None]
    (named,) = load({**GOOD, "responses": [{"epoch": 0, "group": group, "tokens": [2]} for group in (3, "a")]})
    assert [response.group for response in named.responses] == [3, "a"]


def test_turns_keep_who_wrote_them_and_a_cut_ends_inside_one() -> None:
    turns = [
        {"role": "environment", "tokens": [1, 2]},
        {"role": "assistant", "tokens": [3, 4, 5]},
        {"role": "environment", "tokens": []},
        {"role": "assistant", "tokens": [6]},
    ]
    (problem,) = load({**GOOD, "responses": [{"epoch": 0, "turns": turns}]})
    (response,) = problem.responses
    assert response.flat().tolist() == [1, 2, 3, 4, 5, 6]
    assert [turn.generated for turn in response.turns] == [False, True, True]
    assert [turn.tokens.tolist() for turn in response.cut(4)] == [[1, 2], [3, 4]]
    assert [turn.tokens.tolist() for turn in response.cut(5)] == [[1, 2], [3, 4, 5]]
    assert [len(turn.tokens) for turn in response.cut(100)] == [2, 3, 1]


def test_a_number_and_its_text_are_one_id_and_responses_without_ids_are_counted() -> None:
    records = [{"id": key, "prompt": [1], "tokens": [i], "epoch": i} for i, key in enumerate((7, "7", None, 7))]
    recording = Recording(Text())
    list(recording.read(io.BytesIO("\n".join(map(json.dumps, records)).encode()), "own.jsonl"))
    assert [problem.epochs() for problem in recording.problems()] == [[0, 1, 3], [2]]
    assert "4 responses, problems by id, and by prompt for the 1 responses without an id;" in recording.notes()[0]
    with pytest.raises(RecordingError, match="line 2: id: '7' is also on line 1"):
        load({**GOOD, "id": 7}, {**GOOD, "id": "7"})


@pytest.mark.parametrize(
    "nothing", [{"tokens": []}, {"turns": []}, {"turns": [{"role": "assistant", "tokens": []}]}, {"response": []}]
)
def test_a_record_without_text_of_the_model_is_left_out_and_counted(nothing: dict[str, object]) -> None:
    records = [{"prompt": [1], "epoch": 0, **nothing}, {"prompt": [1], "epoch": 1, "tokens": [2]}]
    recording = Recording(Text())
    list(recording.read(io.BytesIO("\n".join(map(json.dumps, records)).encode()), "own.jsonl"))
    (problem,) = recording.problems()
    assert problem.epochs() == [1]
    assert "left out: 1 responses in which the model wrote nothing" in recording.notes()


def response(**fields: Any) -> dict[str, object]:
    return {**GOOD, "id": "b", "responses": [{"epoch": 0, "tokens": [1]}, {"epoch": 1, "tokens": [1], **fields}]}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ([1], "record: should be an object"),
        ({"id": "b", "responses": GOOD["responses"]}, "prompt: missing"),
        ({**GOOD, "id": "b", "prompt": []}, "prompt: must not be empty"),
        ({**GOOD, "id": "b", "prompt": "some text"}, "prompt: should be a valid array, is 'some text'"),
        ({**GOOD, "id": "b", "prompt": [1, 2.5]}, "prompt[1]: should be a valid integer, is 2.5"),
        ({**GOOD, "id": "b", "prompt": [1, True]}, "prompt[1]: should be a valid integer, is True"),
        ({**GOOD, "id": "b", "responses": []}, "responses: must not be empty"),
        (response(epoch=None), "responses[1].epoch: should be a valid integer, is None"),
        (response(epoch=-1), "responses[1].epoch: -1 is below the limit 0"),
        (response(epoch=(1 << 52) + 1), "responses[1].epoch: 4503599627370497 is above the limit 4503599627370496"),
        (response(tokens=[5, -1]), "responses[1].tokens[1]: -1 is below the limit 0"),
        (response(tokens=[1 << 31]), "responses[1].tokens[0]: 2147483648 is above the limit 2147483647"),
        (response(tokens=[1 << 80]), "is above the limit 2147483647"),
        (response(tokens=[]), "responses[1]: must not be empty"),
        (response(tokens=None), "responses[1]: needs exactly one of tokens and turns"),
        (response(turns=[]), "responses[1]: needs exactly one of tokens and turns"),
        (
            response(tokens=None, turns=[{"role": "tool", "tokens": [1]}]),
            "responses[1].turns[0].role: should be 'assistant' or 'environment', is 'tool'",
        ),
        (response(tokens=None, turns=[{"role": "assistant"}]), "responses[1].turns[0].tokens: missing"),
        (response(tokens=None, turns=[{"role": "assistant", "tokens": []}]), "responses[1]: must not be empty"),
        (GOOD, "id: 'a' is also on line 1"),
    ],
)
def test_a_bad_record_is_reported_with_its_line_and_field(record: object, complaint: str) -> None:
    with pytest.raises(RecordingError) as error:
        load(GOOD, record)
    assert str(error.value).startswith("line 2: ")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty: it has no records; give recorded rollouts"),
        (b"\n \n", "has no records"),
        (b"\xef\xbb\xbf", "has no records"),
        (b"{nonsense", "line 1: not JSON"),
        (b"\xff\xfe{}", "is text in UTF-16"),
        (b"\0" * (3 << 20), "line 1: not JSON"),
        (b"{" + b" " * (2 << 20) + b"\0" + b" " * (2 << 20), "line 1: not JSON"),
        (b"[" * 200_000, "line 1: not JSON: recursion limit"),
        (b"9" * (3 << 20), "line 1: not JSON"),
        (b'{"prompt": [' + b"9" * 10_000 + b"]}", "line 1: not JSON: number out of range"),
        (b'{"prompt": [NaN], "responses": []}', "line 1: prompt.0.: should be a valid integer, is nan"),
        (GZIP_MAGIC, "after line 0: the gzip archive is damaged"),
        (ZIPPED[:-8], "the gzip archive is damaged"),
        (ZIPPED[:20] + b"????????", "the gzip archive is damaged"),
    ],
)
def test_a_file_that_is_no_recording_is_reported(content: bytes, complaint: str) -> None:
    with pytest.raises(RecordingError, match=complaint):
        list(read(io.BytesIO(content)))


@pytest.mark.parametrize("before", [b"", b"\n", b" \r\n\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(before: bytes) -> None:
    assert len(list(read(io.BytesIO(b"\xef\xbb\xbf" + before + json.dumps(GOOD).encode())))) == 1


@pytest.mark.parametrize("content", [ZIPPED, json.dumps(GOOD).encode()])
def test_a_pipe_is_read_as_it_comes(content: bytes) -> None:
    """A pipe delivers its bytes one by one, and cannot be read again."""
    ends = os.pipe()

    def feed() -> None:
        with open(ends[1], "wb", buffering=0) as file:
            for byte in content:
                file.write(bytes([byte]))

    with ThreadPoolExecutor(1) as pool, opened(f"/dev/fd/{ends[0]}") as file:
        fed = pool.submit(feed)
        assert len(list(read(file))) == 1
        fed.result()
    os.close(ends[0])


def test_a_device_that_never_ends_a_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: line 1: not JSON"), opened("/dev/zero") as file:
        list(read(file))


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LINE", 2 << 20)
    with pytest.raises(RecordingError, match="line 1: is longer than 2 MiB"):
        list(read(io.BytesIO(b'{"prompt": [' + b"1," * (3 << 20))))


def test_a_file_of_errors_costs_no_more_than_one(tmp_path: Path) -> None:
    record = {**GOOD, "prompt": [-1] * 300_000}
    with pytest.raises(RecordingError, match=r"line 1: prompt\[0\]: -1 is below"):
        load(record)
