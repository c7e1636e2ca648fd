"""Text of tools within responses, and tokenizers that bring code or read odd text."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from histospec.replay import command as replay
from histospec.replay.recordings import Problem, Recording, opened
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.tool_text import Marks, ToolText
from histospec.server.errors import ConfigError

pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ {'tool': 'ipython'}.get(m['role'], m['role']) }}<|im_end|>\n\n"
    "{{ m['content'] }}<|im_start|>{% endfor %}{% if add_generation_prompt %}assistant<|im_end|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], str]:
    """tokenizer(chat template) -> folder of a tokenizer of bytes with two special tokens."""
    tokenizers: Any = import_module("tokenizers")
    pre: Any = import_module("tokenizers.pre_tokenizers")

    def make(template: str | None) -> str:
        alphabet = sorted(pre.ByteLevel.alphabet())
        core = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        core.decoder = tokenizers.decoders.ByteLevel()
        core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        fast = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=core)
        fast.chat_template = template
        folder = tmp_path_factory.mktemp("tokenizer")
        fast.save_pretrained(folder)
        return str(folder)

    return make


def load(tmp_path: Path, records: list[dict[str, Any]], text: Text) -> tuple[list[Problem], str]:
    """Returns the problems of a file with these records, and the notes."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    recording = Recording(text)
    with opened(str(file)) as opened_file:
        list(recording.read(opened_file, file.name))
    return recording.problems(), "\n".join(recording.notes())


def parts(problem: Problem, folder: str) -> list[tuple[str, bool]]:
    """Returns the texts of the problem's only response, and whether the model wrote them."""
    decode = import_module("transformers").AutoTokenizer.from_pretrained(folder).decode
    return [(decode(turn.tokens), turn.generated) for turn in problem.responses[0].turns]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, ["Let me see.", "<tool_response>\n42\n</tool_response>", "It is 42."]),
        (None, ["Let me see.", "\nuser\n<tool_response>\n42\n</tool_response>\nassistant\n", "It is 42."]),
        (None, ["a", "<tool_response>1</tool_response>\n<tool_response>2</tool_response>\n", "b"]),
        (None, ["a", "<information>Doc 1</information>\n\n", "b", "<information>Doc 2</information>", "c"]),
        (None, ["a", "<interpreter>\n3\n</interpreter>\n", "b"]),
        (None, ["a", "\nuser\n<tool_response>\ncut short by the limi"]),
        (None, ["What is <tool_response> for?"]),
        (CHATML, ["a", "\ntool\n42\nassistant\n", "b"]),
        (CHATML, ["a", "\nuser\nNo, try again.\nassistant\n", "b", "\nuser\nYes.\nassistant\n", "c"]),
        (CHATML, ["a", "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n", "b"]),
        (CHATML, ["The lines\nuser\nand tool\nname roles."]),
        (LLAMA, ["a", "ipython\n\n{}assistant\n\n", "b"]),
    ],
)
def test_text_between_marks_is_not_the_models(
    template: str | None, said: list[str], tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    folder = tokenizer(template)
    record = {"input": "Q", "output": "".join(said), "step": 1}
    (problem,), notes = load(tmp_path, [record], Text(folder))
    assert parts(problem, folder) == [(text, i % 2 == 0) for i, text in enumerate(said)]
    if len(said) > 1:
        assert f"tools' text: {sum(map(len, said[1::2])):,} characters in 1 responses" in notes
    else:
        assert "no known mark of a tool's text is in the 1 responses" in notes


def test_marks_can_be_named_and_ignored(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    folder = tokenizer(CHATML)
    record = {"input": "Q", "output": "a[obs]1[/obs]b<tool_response>2</tool_response>c", "step": 1}
    (problem,), _ = load(tmp_path, [record], Text(folder, tools=ToolText([Marks("[obs]", "[/obs]")])))
    assert [generated for _, generated in parts(problem, folder)] == [True, False, True, False, True]
    (problem,), notes = load(tmp_path, [record], Text(folder, tools=ToolText(known=False)))
    assert parts(problem, folder) == [(record["output"], True)]
    assert "tool" not in notes


def test_tools_that_repeat_their_answers_do_not_raise_the_figures(
    tmp_path: Path, tokenizer: Callable[[str | None], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The model writes new text at each step, and the tool always answers the same."""
    draw = random.Random(0)

    def text() -> str:
        return "".join(draw.choices("abcdefghijklmnop", k=40))

    answer = "".join(draw.choices("abcdefghijklmnop", k=300))
    figures = {}
    for name, tool in (("clean", ""), ("tools", f"\nuser\n<tool_response>\n{answer}\n</tool_response>\nassistant\n")):
        draw.seed(1)
        records = [
            {"input": f"Q{i}", "output": text() + tool + text(), "step": step, "num_turns": 4}
            for step in (1, 2)
            for i in range(10)
        ]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        arguments = [str(file), "--tokenizer", tokenizer(None), "--no-plot", "--json", "-", "--cost", "0.05"]
        assert replay.main(arguments) == 0
        figures[name] = json.loads(capsys.readouterr().out)["last_visit"]["costs"][0]["tokens_per_step"]
    assert figures["tools"] == pytest.approx(figures["clean"], rel=0.05)


def test_messages_of_several_turns_say_who_wrote_them(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    folder = tokenizer(None)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion = [
        {"role": "assistant", "content": "ab", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "image"}]},
        {"role": "assistant", "content": "cd", "tool_calls": None},
    ]
    record = {"example_id": 0, "task": "t", "prompt": "Q", "completion": completion, "reward": 1.0}
    (problem,), notes = load(tmp_path, [record], Text(folder))
    assert parts(problem, folder) == [
        ('ab\n<tool_call>\n{"name": "add", "arguments": "{}"}\n</tool_call>', True),
        ("42", False),
        ("so", False),
        ("cd", True),
    ]
    assert "rollouts of prime-rl: 1 responses" in notes


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED = '\n<tool_call>\n{"name": "add", "arguments": "{}"}\n</tool_call>'


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([CALL], CALLED),
        (json.dumps([CALL, CALL]), CALLED * 2),
        ([json.dumps(CALL)], CALLED),
        ([CALL["function"]], CALLED),
        ("null", ""),
        ("", ""),
    ],
)
def test_calls_of_tools_may_be_json_texts(
    calls: object, said: str, tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    folder = tokenizer(None)
    completion = [{"role": "assistant", "content": "ab", "tool_calls": calls}]
    (problem,), _ = load(tmp_path, [{"prompt": "Q", "completion": completion, "step": 1}], Text(folder))
    assert parts(problem, folder) == [(f"ab{said}", True)]


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        (True, ".tool_calls: should be a list of calls, is True"),
        (CALL, ".tool_calls: should be a list of calls, is {'id': '1', 'type"),
        ("add(1, 2)", ".tool_calls: should be a list of calls, is 'add(1, 2)'"),
        ("[" * 100_000, ".tool_calls: should be a list of calls, is '[[["),
        ([CALL, "add"], ".tool_calls[1]: should be a call with its function, is 'add'"),
        ([[CALL]], ".tool_calls[0]: should be a call with its function, is [{'id'"),
    ],
)
def test_other_calls_of_tools_are_named(
    calls: object, complaint: str, tmp_path: Path, tokenizer: Callable[[str | None], str]
) -> None:
    completion = [{"role": "assistant", "content": "ab", "tool_calls": calls}]
    with pytest.raises(ConfigError, match=re.escape(f"own.jsonl: line 1: completion[0]{complaint}")):
        load(tmp_path, [{"prompt": "Q", "completion": completion, "step": 1}], Text(tokenizer(None)))


def test_reasoning_is_the_models_text_once(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    folder = tokenizer(None)
    completion = [
        {"role": "assistant", "content": "It is 42.", "reasoning_content": "12 + 30"},
        {"role": "tool", "content": "yes", "reasoning": "no text of the model"},
        {"role": "assistant", "content": None, "reasoning": "Done", "reasoning_content": "Done"},
        {"role": "assistant", "content": "Bye", "reasoning": None},
    ]
    (problem,), notes = load(tmp_path, [{"prompt": "Q", "completion": completion, "step": 1}], Text(folder))
    assert parts(problem, folder) == [("12 + 30\n\nIt is 42.", True), ("yes", False), ("Done", True), ("Bye", True)]
    assert "reasoning: 2 messages have it in a field of its own; it counts as the model's" in notes


def test_reasoning_that_is_no_text_is_named(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    completion = [{"role": "assistant", "content": "42", "reasoning": {"effort": "high"}}]
    with pytest.raises(ConfigError, match=r"line 1: completion\[0\].reasoning: should be text, is {'effort': 'high'}"):
        load(tmp_path, [{"prompt": "Q", "completion": completion, "step": 1}], Text(tokenizer(None)))


def test_half_of_a_surrogate_pair_is_read_and_reported(tmp_path: Path, tokenizer: Callable[[str | None], str]) -> None:
    folder = tokenizer(None)
    records = [{"input": "Q", "output": f"a{letter}b", "step": 1} for letter in ("\ud835", "\udcb2", "\ud83d\ude00")]
    (problem,), notes = load(tmp_path, records, Text(folder))
    decode = import_module("transformers").AutoTokenizer.from_pretrained(folder).decode
    assert [decode(response.flat()) for response in problem.responses] == ["a�b", "a�b", "a😀b"]
    assert "half surrogate pairs in 2 texts" in notes


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(tmp_path: Path) -> None:
    """Runs in a process whose standard input would answer yes."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class Own(PreTrainedTokenizer):\n"
        "    vocab_size = 256\n"
        "    def get_vocab(self): return {chr(i): i for i in range(256)}\n"
        "    def _tokenize(self, text, **_): return list(text)\n"
        "    def _convert_token_to_id(self, token): return ord(token) % 256\n"
        "    def _convert_id_to_token(self, index): return chr(index)\n"
    )
    records = [{"input": "Q", "output": "a text", "step": step} for step in (1, 2)]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub")}  # where transformers keeps the code that it runs
    command = [sys.executable, "-m", "histospec.server", "replay", str(file), "--no-plot", "--tokenizer"]
    ran = subprocess.run([*command, str(folder)], input="y\n" * 9, capture_output=True, text=True, env=env, timeout=250)
    assert ran.returncode == 2
    assert "needs code of its own; read that code, and let it run with --trust-remote-code" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""
    assert not (tmp_path / "ran").exists()
    ran = subprocess.run(
        [*command, str(folder), "--trust-remote-code"], input="", capture_output=True, text=True, env=env, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "ran").exists()
