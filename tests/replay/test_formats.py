"""Recordings of several formats, written here with the frameworks' own code."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.replay import command as replay
from histospec.replay.recordings import Problem, Recording, Tokens, opened
from histospec.replay.recordings.names import steps
from histospec.replay.recordings.text import Text
from histospec.server import cli
from histospec.server.errors import ConfigError

transformers = pytest.mark.skipif(util.find_spec("transformers") is None, reason="transformers is not installed")
parquet = pytest.mark.skipif(util.find_spec("pyarrow") is None, reason="pyarrow is not installed")

SAID = "Let us add 12 and 30 carefully: 12 + 30 is 42. The answer is 42."
ASKED = "What is 12 + 30?"


def load(*files: Path, tokenizer: Path | None = None, fields: dict[str, str] | None = None) -> Recording:
    recording = Recording(Text(None if tokenizer is None else str(tokenizer)), fields, len(files) > 1)
    for path, step in zip(files, steps([*map(str, files)]), strict=True):
        with opened(str(path)) as file:
            list(recording.read(file, path.name, step))
    return recording


def problems(*files: Path, **options: Any) -> list[Problem]:
    return load(*files, **options).problems()


def lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def said(problem: Problem) -> list[tuple[int, list[int]]]:
    """Returns epoch and text of every response."""
    return [(response.epoch, response.flat().tolist()) for response in problem.responses]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a saved tokenizer of bytes with a chat template."""
    pytest.importorskip("transformers")
    tokenizers: Any = import_module("tokenizers")
    pre: Any = import_module("tokenizers.pre_tokenizers")
    alphabet = sorted(pre.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    fast = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=core)
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


def decoded(tokenizer: Path, tokens: Tokens) -> str:
    return str(import_module("transformers").AutoTokenizer.from_pretrained(tokenizer).decode(tokens))


# ---- a response a record ------------------------------------------------------------------------------------------


def test_responses_without_ids_are_grouped_by_prompt(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "own.jsonl",
        [
            {"prompt": [1, 2], "tokens": [5, 6], "epoch": 0, "reward": 1.0},
            {"prompt": [3], "tokens": [7], "epoch": 0},
            {"prompt": [1, 2], "response": [5, 8], "epoch": 4},
            {"prompt": [3], "epoch": 4, "turns": [
                {"role": "assistant", "tokens": [7]}, {"role": "environment", "tokens": [9, 9]}]},
        ],
    )  # fmt: skip
    first, second = problems(file)
    assert first.prompt.tolist() == [1, 2]
    assert said(first) == [(0, [5, 6]), (4, [5, 8])]
    assert [[turn.generated for turn in response.turns] for response in second.responses] == [[True], [True, False]]


def test_ids_join_prompts_that_go_on_and_namespaces_keep_them_apart(tmp_path: Path) -> None:
    """A later turn has a prompt that repeats the first: their common prefix is the prompt, the rest is context."""
    records = [
        {"id": "a", "prompt": [1, 2], "tokens": [5], "epoch": 0},
        {"id": "a", "prompt": [1, 2, 5, 9], "tokens": [6], "epoch": 0},
        {"id": "a", "namespace": "other", "prompt": [1, 2], "tokens": [5], "epoch": 0},
    ]
    first, other = problems(lines(tmp_path / "own.jsonl", records))
    assert first.prompt.tolist() == [1, 2]
    later = first.responses[1]
    assert [(turn.tokens.tolist(), turn.generated) for turn in later.turns] == [([5, 9], False), ([6], True)]
    assert len(other.responses) == 1


def test_without_epochs_a_group_is_a_visit_wherever_its_records_are(tmp_path: Path) -> None:
    records = [{"prompt": [1], "tokens": [i], "group": group} for i, group in enumerate(["x", "y", "x", "z", "y"])]
    recording = load(lines(tmp_path / "own.jsonl", records))
    (problem,) = recording.problems()
    assert said(problem) == [(0, [0]), (1, [1]), (0, [2]), (2, [3]), (1, [4])]
    assert "each group is a visit, in the order of their first records" in recording.notes()[0]


def test_counted_weight_changes_become_epochs_as_on_the_server(tmp_path: Path) -> None:
    def one(token: int, worker: str, **fields: int) -> dict[str, object]:
        return {"prompt": [1], "tokens": [token], "worker": worker, **fields}

    records = [
        one(0, "a", changes=7),  # a file that starts in the middle of a run
        one(1, "a", changes=8),
        one(2, "b", changes=0),  # a restarted worker continues from the newest epoch
        one(3, "b", changes=1),
        one(4, "a", changes=8),  # a late response also gets the newest epoch
        one(5, "a", epoch=9),
        one(6, "b", changes=2),  # from now on, counts no longer change the epoch
    ]
    (problem,) = problems(lines(tmp_path / "own.jsonl", records))
    assert [response.epoch for response in problem.responses] == [0, 1, 1, 2, 2, 9, 9]


def test_fields_of_other_names_are_read_under_ours(tmp_path: Path) -> None:
    records = [{"question_ids": [1], "answer": [2, 3], "global_step": 5, "uid": "q"}]
    fields = {"prompt": "question_ids", "response": "answer", "epoch": "global_step", "id": "uid"}
    (problem,) = problems(lines(tmp_path / "own.jsonl", records), fields=fields)
    assert said(problem) == [(5, [2, 3])]
    with pytest.raises(
        ConfigError, match=r"line 1: missing_one: missing, but --fields names it for prompt; the record has"
    ):
        problems(tmp_path / "own.jsonl", fields={"prompt": "missing_one"})


def test_several_files_are_one_recording(tmp_path: Path) -> None:
    whole = {"id": "a", "prompt": [1], "responses": [{"epoch": 0, "tokens": [5]}]}
    files = [lines(tmp_path / "0.jsonl", [whole]), tmp_path / "1.jsonl.gz", tmp_path / "2.jsonl"]
    files[1].write_bytes(gzip.compress(json.dumps({"id": "a", "prompt": [1], "tokens": [6], "epoch": 1}).encode()))
    lines(files[2], [{**whole, "responses": [{"epoch": 2, "tokens": [7]}]}])
    (problem,) = problems(*files)
    assert said(problem) == [(0, [5]), (2, [7]), (1, [6])] or sorted(said(problem)) == [(0, [5]), (1, [6]), (2, [7])]


# ---- the frameworks -----------------------------------------------------------------------------------------------


def verl(folder: Path, step: int, inputs: list[str], outputs: list[str]) -> Path:
    """Writes a step as verl's trainer does (`_write_generations`)."""
    n = len(inputs)
    base: dict[str, list[Any]] = {
        "input": inputs,
        "output": outputs,
        "gts": [None] * n,
        "score": [float("nan")] * n,
        "step": [step] * n,
    }
    base["uid"] = [f"5f0d_{i}_0" for i in range(n)]  # from a reward function or verl itself: different in every step
    path = folder / f"{step}.jsonl"
    with path.open("w") as file:
        for i in range(n):
            file.write(json.dumps({k: v[i] for k, v in base.items()}, ensure_ascii=False, default=str) + "\n")
    return path


@transformers
def test_a_dump_of_verl(tmp_path: Path, tokenizer: Path) -> None:
    files = [
        verl(tmp_path, 1, [ASKED, ASKED, "Und 2 · 3?"], [SAID, SAID + " Sure.", "6"]),
        verl(tmp_path, 2, [ASKED, ASKED, "Und 2 · 3?"], [SAID, "", "sechs ≠ 5"]),
    ]
    recording = load(*files, tokenizer=tokenizer)
    first, second = recording.problems()
    assert decoded(tokenizer, first.prompt) == ASKED
    assert first.epochs() == second.epochs() == [1, 2]
    assert [decoded(tokenizer, response.flat()) for response in second.responses] == ["6", "sechs ≠ 5"]
    notes = "\n".join(recording.notes())
    assert "rollout dumps of verl: 5 responses, problems by prompt; epochs: the field step" in notes
    assert "special tokens that the text lacks are missing" in notes
    assert "left out: 1 responses in which the model wrote nothing" in notes


@transformers
def test_a_dump_of_verl_gives_the_table_of_its_tokens(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [[SAID.replace("42", str(40 + i % 2 * step)) for i in range(4)] for step in (1, 2, 3)]
    files = [verl(tmp_path, i + 1, [ASKED] * 4, said) for i, said in enumerate(texts)]
    encode = import_module("transformers").AutoTokenizer.from_pretrained(tokenizer).encode
    responses = [{"epoch": i + 1, "tokens": encode(text)} for i, said in enumerate(texts) for text in said]
    same = lines(tmp_path / "same.jsonl", [{"prompt": encode(ASKED), "responses": responses}])
    figures = []
    for names in (files, [same]):
        assert replay.main([*map(str, names), "--no-plot", "--json", "-", "--tokenizer", str(tokenizer)]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0]["last_visit"] == figures[1]["last_visit"]
    assert figures[0]["epochs"] == figures[1]["epochs"]
    assert figures[1]["notes"] == []


def trl(folder: Path, step: int, prompts: list[str], completions: list[str]) -> Path:
    """Logs completions as TRL's GRPOTrainer does (`log`)."""
    pd = pytest.importorskip("pandas")
    table = {
        "step": [step] * len(prompts),
        "prompt": prompts,
        "completion": completions,
        "accuracy_reward": [float("nan")] * len(prompts),
        "advantage": [0.5] * len(prompts),
    }
    path = folder / f"completions_{step:05d}.parquet"
    pd.DataFrame(table).to_parquet(path)
    return path


@parquet
@transformers
def test_completions_of_trl_and_what_it_logs_again(tmp_path: Path, tokenizer: Path) -> None:
    files = [
        trl(tmp_path, 10, [ASKED, ASKED], [SAID, "42"]),
        trl(tmp_path, 11, [ASKED, ASKED], [SAID, "42"]),  # the trainer took a second step on the same batch
        trl(tmp_path, 12, [ASKED, ASKED], [SAID + "!", "42"]),
    ]
    recording = load(*reversed(files), tokenizer=tokenizer)
    (problem,) = recording.problems()
    assert problem.epochs() == [10, 12]
    assert decoded(tokenizer, problem.responses[2].flat()) == SAID + "!"
    notes = "\n".join(recording.notes())
    assert "completions of TRL: 4 responses" in notes
    assert "left out: 2 responses that TRL logged again under a later step" in notes


def nemo_rl(folder: Path, step: int, rows: Sequence[tuple[list[int], list[int]]]) -> Path:
    """Writes a batch as NeMo-RL's logger does: padded, each value in a slice of one."""
    width = max(len(tokens) for tokens, _ in rows)
    path = folder / f"train_data_step{step}.jsonl"
    with path.open("w") as file:
        for i, (tokens, mask) in enumerate(rows):
            pad = [0] * (width - len(tokens))
            sample = {"content": ["text"], "rewards": [1.0], "input_lengths": [len(tokens)], "idx": i,
                      "token_ids": [tokens + pad], "token_loss_mask": [mask + pad]}  # fmt: skip
            file.write(json.dumps(sample) + "\n")
    return path


def test_training_data_of_nemo_rl_has_its_tokens_and_turns(tmp_path: Path) -> None:
    files = [
        nemo_rl(tmp_path, 3, [([1, 2, 5, 6], [0, 0, 1, 1]), ([1, 2, 5, 9, 9, 6], [0, 0, 1, 0, 0, 1])]),
        nemo_rl(tmp_path, 4, [([1, 2, 7], [0, 0, 1]), ([1, 2], [0, 0])]),
    ]
    recording = load(*files)
    (problem,) = recording.problems()
    assert problem.prompt.tolist() == [1, 2]
    assert said(problem) == [(3, [5, 6]), (3, [5, 9, 9, 6]), (4, [7])]
    assert [turn.generated for turn in problem.responses[1].turns] == [True, False, True]
    assert "the step in the files' names" in recording.notes()[0]


@transformers
def test_chat_messages_become_what_the_model_was_given(tmp_path: Path, tokenizer: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    record = {"prompt": prompt, "completion": [{"role": "assistant", "content": "42"}], "step": 0}
    (problem,) = problems(lines(tmp_path / "chat.jsonl", [record]), tokenizer=tokenizer)
    assert decoded(tokenizer, problem.prompt) == f"system: Be brief.\nuser: {ASKED}\nassistant: "
    assert decoded(tokenizer, problem.responses[0].flat()) == "42"


@parquet
def test_parquet_may_hold_the_documented_format_and_come_through_a_pipe(tmp_path: Path) -> None:
    arrow: Any = import_module("pyarrow")
    rows = [{"id": "a", "prompt": [1, 2], "responses": [
        {"epoch": 0, "tokens": [5, 6], "turns": None},
        {"epoch": 1, "tokens": None, "turns": [{"role": "assistant", "tokens": [5, 7]}]}]}]  # fmt: skip
    path = tmp_path / "rollouts.parquet"
    import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    (problem,) = problems(path)
    assert said(problem) == [(0, [5, 6]), (1, [5, 7])]

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        fed = pool.submit(pipe.write_bytes, path.read_bytes())
        (again,) = problems(pipe)
        fed.result()
    assert said(again) == said(problem)


# ---- what is wrong ------------------------------------------------------------------------------------------------


GOOD = {"prompt": [1, 2], "tokens": [5], "epoch": 0}
NEMO = {"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 1, 1]], "input_lengths": [3]}


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([GOOD, {"prompt": [1, -2], "tokens": [5], "epoch": 0}], "line 2: prompt[1]: -2 is below the limit 0"),
        ([GOOD, {**GOOD, "tokens": [5, 1 << 31]}], "line 2: tokens[1]: 2147483648 is above the limit 2147483647"),
        ([GOOD, {**GOOD, "tokens": [0.5]}], "line 2: tokens[0]: should be a valid integer, is 0.5"),
        ([GOOD, {**GOOD, "tokens": [float("nan")]}], "line 2: tokens[0]: should be a valid integer, is nan"),
        ([GOOD, {**GOOD, "prompt": []}], "line 2: prompt: must not be empty; remove the record"),
        ([GOOD, {"tokens": [1]}], "line 2: prompt: missing"),
        ([GOOD, {**GOOD, "response": [1]}], "line 2: needs exactly one of tokens, turns and response; has tokens and"),
        ([GOOD, {"prompt": [1], "epoch": 0}], "line 2: needs exactly one of tokens, turns and response; has none of"),
        ([GOOD, {**GOOD, "epoch": 1.5}], "line 2: epoch: should be a valid integer, is 1.5"),
        ([GOOD, {**GOOD, "epoch": -1}], "line 2: epoch: -1 is below the limit 0"),
        ([GOOD, {"prompt": [1], "tokens": [1]}], "line 2: epoch: missing, while line 1 has one; give all records an"),
        ([GOOD, {**GOOD, "id": 1.5}], "line 2: id: should be a valid string, is 1.5"),
        ([GOOD, {**GOOD, "tokens": "42"}], "line 2: tokens: is text; name the tokenizer of the run's model with --tok"),
        ([GOOD, {**GOOD, "prompt": [{"role": "user", "content": "?"}]}], "line 2: prompt: is text; name the tokenizer"),
        ([GOOD, {"prompt": [1], "turns": [{"role": "tool", "tokens": [1]}]}], "line 2: turns[0].role: should be 'as"),
        ([GOOD, [1]], "line 2: record: should be an object, is [1]; write one record a line: jq -c '.[]' FILE"),
        ([{"id": "a", **GOOD}, {**GOOD, "id": "a", "prompt": [9]}], "line 2: prompt: differs from that of line 1"),
        ([{"input": "a", "output": "b", "step": 1}], "line 1: input: is text; name the tokenizer of the run's model"),
        ([GOOD, {"input": "a", "output": "b"}], "line 1 has another format (one response per record) than"),
        ([{"messages": [], "score": 1}], "line 1: no known format has these fields: messages, score. Known are"),
        ([{**NEMO, "token_loss_mask": [[0, 1]]}], "line 1: token_loss_mask: should have one entry for each of the 3"),
        ([{**NEMO, "token_loss_mask": [[0, 1, 2]]}], "line 1: token_loss_mask[2]: should be 0 or 1, is 2"),
        ([{**NEMO, "token_loss_mask": [[1, 1, 1]]}], "line 1: token_loss_mask: begins with 1, so there is no pro"),
        ([{**NEMO, "input_lengths": [4]}], "line 1: input_lengths: should be from 1 to 3, the number of token_ids, is"),
        ([{**NEMO, "token_ids": [["a"]]}], "line 1: token_ids[0]: should be a valid integer, is 'a'"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_sentence_with_line_and_field(
    records: list[object], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "own.jsonl", records)
    assert cli.main(["replay", str(file), "--no-plot"]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert "own.jsonl: " in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"prompt": [1],\n "tokens": [2]}\n', "line 1: not JSON: EOF while parsing"),
        (b'{"prompt": [1],\n "tokens": [2]}\n', "a record must be one line: jq -c . FILE"),
        (b"\x28\xb5\x2f\xfd\0\0", "is packed with zstd, which is not supported; zstd -dc FILE | histospec replay -"),
        (b"PAR1" + b"\0" * 40, "after row 0: the Parquet file is damaged"),
        (gzip.compress(b"PAR1" + b"\0" * 40, mtime=0), "is a gzipped Parquet file; unpack it with gunzip first"),
        (gzip.compress(b'{"prompt": [1], "tokens": [2]}\n' * 500, mtime=0)[:60], "the gzip archive is damaged"),
        (b"\x7fELF" + b"\x00\x01\x02" * 1000, "line 1: not JSON"),
        (b'{"prompt": [1], "tokens": [2]}\n{"prompt": [1], "tok', "the last line is cut short: leave it out"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_sentence(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content.startswith(b"PAR1"):
        pytest.importorskip("pyarrow")
    file = tmp_path / "own.bin"
    file.write_bytes(content)
    assert cli.main(["replay", str(file), "--no-plot"]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert told.count("\n") == 1


@parquet
def test_a_row_of_parquet_is_named(tmp_path: Path) -> None:
    arrow: Any = import_module("pyarrow")
    table = arrow.Table.from_pylist(
        [{"prompt": [1], "tokens": [2], "epoch": 0}, {"prompt": [1], "tokens": [-2], "epoch": 0}]
    )
    import_module("pyarrow.parquet").write_table(table, tmp_path / "own.parquet")
    with pytest.raises(ConfigError, match=r"own.parquet: row 2: tokens\[0\]: -2 is below the limit 0"):
        problems(tmp_path / "own.parquet")


@pytest.mark.parametrize(
    ("missing", "arguments", "complaint"),
    [
        ("pyarrow", ["table.parquet"], "is a Parquet file, which needs the package pyarrow: pip install pyarrow"),
        (
            "transformers",
            ["own.jsonl", "--tokenizer", "x"],
            "--tokenizer: text needs the package transformers, which is",
        ),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(
    missing: str, arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in (missing, f"{missing}.parquet"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    monkeypatch.chdir(tmp_path)
    Path("table.parquet").write_bytes(b"PAR1" + b"\0" * 40)
    lines(Path("own.jsonl"), [GOOD])
    assert cli.main(["replay", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@transformers
def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent"
    assert cli.main(["replay", "own.jsonl", "--tokenizer", str(absent)]) == 2
    told = capsys.readouterr().err
    assert f"--tokenizer: {str(absent)!r}"[:50] in told
    assert "cannot be loaded" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("value", ["prompt", "question=prompt", "prompt="])
def test_fields_of_the_wrong_form_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "own.jsonl", "--fields", value]) == 2
    assert "--fields: must be such as prompt=question,response=answer" in capsys.readouterr().err


def test_several_files_and_a_pipe_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    text = rng.integers(10, 1000, 60)
    write: Callable[[int], object] = lambda step: lines(  # noqa: E731
        tmp_path / f"{step}.jsonl",
        [{"prompt": [1, i], "tokens": [*text.tolist(), i, step], "epoch": step} for i in range(3)],
    )
    write(0), write(1)
    os.mkfifo("second")
    with ThreadPoolExecutor(1) as pool:
        fed = pool.submit(Path("second").write_bytes, Path("1.jsonl").read_bytes())
        assert replay.main(["0.jsonl", "second", "--cost", "0.05"]) == 0
        fed.result()
    told = capsys.readouterr().out
    assert f"{tmp_path.name[:37]}" in told
    assert "2 files" in told or "..." in told
    assert "read 2 files in the given order: 0.jsonl to second" in told
    assert "the field epoch" in told
    assert Path(f"{tmp_path.name}.replay.png").exists()
