"""Files as people have them: what Python alone reads is read, and other formats are named with a line that helps."""

import gzip
import io
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from histospec.replay.recordings import RecordingError, read
from histospec.server import cli

TWO = [{"prompt": [1, 2], "tokens": [3, 4, 5, 6] * 9, "epoch": epoch, "text": "abc"} for epoch in (1, 2)]
GOOD = "".join(json.dumps(record) + "\n" for record in TWO)
ARRAY = "[\n" + ",\n".join(json.dumps(record) for record in TWO) + "\n]\n"
CSV = "prompt,response/text,epoch\nWhat is 1 + 1?,2,1\n"


def lines(**more: Any) -> str:
    return "".join(json.dumps(record | more) + "\n" for record in TWO)


@pytest.mark.parametrize(
    "content",
    [
        lines(gts="abc\ud835def"),
        lines(gts="x\udcb2"),
        lines(score=math.nan, advantage=-math.inf),
        lines(uid=2**127 + 1),
        lines(text="a\u2028b\x0cc"),
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("abc", "a\u2028b"),
    ],
)
def test_what_python_reads_is_read(content: str) -> None:
    (problem,) = read(io.BytesIO(content.encode()))
    assert problem.epochs() == [1, 2]


def test_problems_of_one_line_with_odd_fields_are_read() -> None:
    record = {"prompt": [1], "responses": [{"epoch": 0, "tokens": [2]}], "text": "\ud835", "score": -math.inf}
    (problem,) = read(io.BytesIO(json.dumps(record).encode()))
    assert problem.responses[0].flat().tolist() == [2]


@pytest.mark.parametrize("kind", [float, str, int])
def test_whole_floats_and_digits_are_integers(kind: Any) -> None:
    one = {"id": "a", "prompt": [kind(1)], "tokens": list(map(kind, (5, 6))), "epoch": kind(3)}
    whole = {"prompt": [kind(1)], "responses": [{"epoch": kind(3), "tokens": [kind(5), 6]}]}
    turns = {"prompt": [1], "turns": [{"role": "assistant", "tokens": [kind(5), kind(6)]}], "epoch": kind(3)}
    nemo = {
        "token_ids": [[kind(1), kind(5), kind(6)]],
        "token_loss_mask": [[0.0, 1.0, 1.0]],
        "input_lengths": [kind(3)],
    }
    for record in (one, whole, turns, nemo):
        (problem,) = read(io.BytesIO(json.dumps(record).encode()))
        assert problem.prompt.tolist() == [1]
        assert problem.responses[0].flat().tolist() == [5, 6]
    named = [{"id": key, "prompt": [1], "tokens": [5], "epoch": 0} for key in (3, 3.0, "3")]
    assert len(list(read(io.BytesIO("\n".join(map(json.dumps, named)).encode())))) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (GOOD.encode("utf-16"), "is text in UTF-16 or UTF-32, as of PowerShell's >; iconv -f UTF-16 -t UTF-8 FILE"),
        (GOOD.encode("utf-16-le"), "iconv -f UTF-16LE -t UTF-8 FILE | histospec replay -"),
        (GOOD.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8 FILE | histospec replay -"),
        (GOOD.encode("utf-32"), "iconv -f UTF-32 -t UTF-8 FILE | histospec replay -"),
        (gzip.compress(GOOD.encode("utf-16"), mtime=0), "iconv -f UTF-16 -t UTF-8 FILE"),
        (GOOD.encode() + b"\0" * 512, "line 3: not JSON: has NUL bytes; the file is binary, or a crash lost this part"),
        (GOOD.encode()[:-9] + b"\0" * (3 << 20), "line 2: not JSON: has NUL bytes"),
        (GOOD.replace("}\n{", "}{").encode(), "a second record may begin there: jq -c . FILE writes each on its own"),
        (ARRAY.encode(), "not JSON: EOF while parsing a list at column 1; write one record a line: jq -c '.[]'"),
        (CSV.encode(), "is a table of text, such as CSV; pandas.read_csv('FILE').to_json('FILE.jsonl', orient="),
        (b"\xef\xbb\xbf" + CSV.replace(",", "\t").encode(), "is a table of text, such as CSV"),
        (b"PK\x03\x04" + b"\0" * 60, "is a file of torch.save, or a zip archive, which may run code when it is read"),
        (b"\x80\x05\x95\x10", "is a file of pickle, which may run code when it is read; write its records as JSON"),
        (lines(prompt=["a", "b"]).encode(), "line 1: prompt: is a list of 2 texts; write one record for each: jq -c"),
        (lines(tokens=[[1], [2], [3]]).encode(), "line 1: tokens: is a list of 3 lists; write one record for each: jq"),
        (b'{"prompt": [1], "responses": ["a", "b"]}\n', "line 1: responses[0]: should be"),
        (b'{"prompt": [1], "responses": ["a", "b"]}\n', "text is read where each record is one response"),
    ],
)  # fmt: skip
def test_other_formats_are_named(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(content)
    assert cli.main(["replay", str(file), "--no-plot"]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("kind", ["new_file", "new_stream"])
def test_arrow_is_named(kind: str) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(TWO)
    written = io.BytesIO()
    with getattr(import_module("pyarrow.ipc"), kind)(written, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(RecordingError, match=r"is an Arrow file; datasets.Dataset.from_file\('FILE'\).to_parquet"):
        list(read(io.BytesIO(written.getvalue())))


def parquet(records: list[dict[str, Any]], **columns: Any) -> io.BytesIO:
    """Returns a Parquet file of these records and further columns."""
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(records)
    for name, column in columns.items():
        table = table.append_column(name, column)
    file = io.BytesIO()
    import_module("pyarrow.parquet").write_table(table, file)
    return io.BytesIO(file.getvalue())


def of_the_year_30000() -> Any:
    """Returns a column that Arrow can hold and Python cannot."""
    arrow: Any = pytest.importorskip("pyarrow")
    return arrow.array([884_541 * 10**12] * 2, arrow.timestamp("us"))


def test_a_column_that_the_replay_does_not_use_may_hold_anything() -> None:
    (problem,) = read(parquet(TWO, created=of_the_year_30000()))
    assert problem.epochs() == [1, 2]
    with pytest.raises(RecordingError, match="row 1: no known format has these fields: text, created"):
        list(read(parquet([{"text": "abc"}] * 2, created=of_the_year_30000())))


def test_a_column_that_the_replay_uses_is_named_if_it_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.parquet"
    file.write_bytes(parquet(TWO, created=of_the_year_30000()).getvalue())
    assert cli.main(["replay", str(file), "--no-plot", "--fields", "group=created"]) == 2
    told = capsys.readouterr().err
    assert "own.parquet: rows 1 to 2: created: a value of the type timestamp[us] cannot be read (" in told
    assert "write the column as numbers or text" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "records",
    [
        [{"prompt": [1], "responses": [{"epoch": 3, "tokens": [2], "group": 1}], "namespace": "a", "id": "x"}],
        [{"prompt": [1, i], "tokens": [2], "epoch": i, "id": "x", "namespace": "a", "group": 1} for i in range(3)],
        [{"prompt": [1], "response": [2], "changes": i // 2, "worker": "ab"[i % 2]} for i in range(4)],
        [{"prompt": [1], "completion": [2], "step": 4}],
        [{"token_ids": [1, 2, 3, 4], "token_loss_mask": [0, 1, 1, 1], "input_lengths": 3}],
    ],
)
def test_parquet_is_read_like_json_lines(records: list[dict[str, Any]]) -> None:
    written = "".join(json.dumps(record) + "\n" for record in records)
    said = [
        [[(one.epoch, one.group, one.flat().tolist()) for one in problem.responses] for problem in read(file)]
        for file in (io.BytesIO(written.encode()), parquet(records))
    ]
    assert said[0] == said[1]


def test_the_order_of_records_makes_no_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rollouts arrive as they complete: the siblings of a group are not adjacent."""
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": [1, problem], "tokens": [5, 6, 7, 8] * 9} for problem in (0, 1, 0, 2, 1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["replay", str(file), "--no-plot"]) == 2
    told = capsys.readouterr().err
    assert "no record has an epoch or a group, and their order does not tell when the policy changed" in told
    assert "--fields epoch=FIELD" in told

    assert cli.main(["replay", str(file), "--no-plot", "--mode", "all", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert "all responses of a problem are one visit, whatever their order" in figures["notes"][0]
    assert [epoch["epoch"] for epoch in figures["epochs"]] == [0]

    file.write_text("".join(json.dumps({**row, "group": f"g{i // 3}"}) + "\n" for i, row in enumerate(rows)))
    assert cli.main(["replay", str(file), "--no-plot", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert "each group is a visit" in figures["notes"][0]
    assert figures["problems_with_history"] == 1
