"""The process of a command: standard streams that are closed or full, and signals at any moment."""

import array
import fcntl
import os
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path
from typing import Any

import pytest

from histospec.server import cli
from histospec.server.errors import ConfigError
from tests.support import children
from tests.support.children import Child, ignored
from tests.support.waiting import eventually

GOOD = '{"prompt":[1,2,3],"responses":[{"epoch":0,"tokens":[4,5,6,7,8]},{"epoch":1,"tokens":[4,5,6,7,8]}]}\n'
COMMAND = f"{sys.executable} -m histospec.server"


def shell(line: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    file = tmp_path / "good.jsonl"
    file.write_text(GOOD)
    return file


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--version", "--help", "serve --help", "replay --no-plot FILE"])
def test_an_output_that_is_full_or_closed_is_one_sentence(tmp_path: Path, recording: Path, words: str) -> None:
    line = f"{COMMAND} {words.replace('FILE', str(recording))}"
    for where, why in ((">/dev/full", "no space left on device"), (">&-", "bad file descriptor")):
        done = shell(f"{line} {where}", cwd=tmp_path)
        assert done.returncode == 1
        assert f"the standard output: {why}" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "replay --no-plot FILE"])
def test_a_reader_that_leaves_is_no_reason_to_complain(tmp_path: Path, recording: Path, words: str) -> None:
    """The reader has closed its end before any output."""
    ends = os.pipe()
    os.close(ends[0])
    command = [*COMMAND.split(), *words.replace("FILE", str(recording)).split()]
    done = subprocess.run(command, stdout=ends[1], stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    os.close(ends[1])
    assert (done.returncode, done.stderr.strip()) == (1, "")


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_an_error_that_cannot_be_said_leaves_the_exit_code(tmp_path: Path, recording: Path, where: str) -> None:
    assert shell(f"{COMMAND} replay absent.jsonl {where}", cwd=tmp_path).returncode == 2
    assert shell(f"{COMMAND} status 127.0.0.1:1 {where}", cwd=tmp_path).returncode == 1
    done = shell(f"{COMMAND} replay {recording} --no-plot --json figures.json {where}", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "figures.json").read_text().startswith("{")


def test_no_file_takes_the_place_of_a_stream_that_is_closed(tmp_path: Path) -> None:
    """The next warning would overwrite a database opened as descriptor 2."""
    program = "import os; print({os.readlink(f'/proc/self/fd/{n}') for n in (0, 2)}); return 0"
    done = run_command(program, "0<&- 2>&-")
    assert done.stdout == "{'/dev/null'}\n"


def run_command(body: str, redirected: str = "") -> "subprocess.CompletedProcess[str]":
    return shell(f"{sys.executable} -c {quoted(body)} {redirected}", cwd="/")


def program(body: str) -> str:
    """Returns the process of a command with this body."""
    text = textwrap.indent(textwrap.dedent(body.replace("; ", "\n")), "    ")
    return (
        "import sys\nfrom histospec.server import process\n"
        f"def command():\n    process.imported(logs=False)\n{text}\nsys.exit(process.run(command))"
    )


def quoted(body: str) -> str:
    return "'" + program(body).replace("'", "'\\''") + "'"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_command_clean_up(number: int) -> None:
    body = "try:\n    print('begun', flush=True)\n    signal.pause()\nfinally:\n    print('cleaned up', flush=True)\n"
    with Child(sys.executable, "-c", "import signal\n" + program(body), cwd="/") as child:
        child.wait_for("begun")
        child.send_signal(number)
        assert child.end() == (128 + number, "begun\ncleaned up\n")


def test_a_signal_inside_of_a_finalizer_is_not_lost() -> None:
    body = """
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
    print('begun', flush=True)
    del Finalized().__dict__
    while True:
        signal.pause()
    """
    with Child(sys.executable, "-c", "import signal\n" + program(body), cwd="/") as child:
        assert child.end() == (130, "begun\n")


def test_a_command_does_not_wait_for_a_thread_that_never_ends() -> None:
    body = "import threading\nthreading.Thread(target=threading.Event().wait).start()\nprint('begun', flush=True)\n"
    with Child(sys.executable, "-c", "import signal\n" + program(body + "signal.pause()"), cwd="/") as child:
        child.wait_for("begun")
        child.send_signal(signal.SIGINT)
        assert child.end() == (130, "begun\n")


def test_a_signal_is_raised_in_no_callback_of_a_loop() -> None:
    body = """
    import asyncio
    async def work():
        def spin():
            asyncio.get_running_loop().call_soon(spin)
        spin()
        print('begun', flush=True)
        await asyncio.Event().wait()
    process.run_loop(work())
    """
    with Child(sys.executable, "-c", program(body), cwd="/") as child:
        child.wait_for("begun")
        child.send_signal(signal.SIGTERM)
        code, text = child.end()
    assert code == 143
    assert "callback" not in text


@pytest.mark.parametrize("words", [["replay", "-", "--no-plot"], ["restore", "-", "--to", "127.0.0.1:1"]])
def test_an_interrupt_while_the_input_is_waited_for(words: list[str]) -> None:
    """The process is interrupted while it imports, or once it reads; its standard input stays empty."""
    for loaded in ("rich", "pydantic_core"):
        with children.histospec(*words, stdin=subprocess.PIPE, env=os.environ | {"PYTHONVERBOSE": "1"}) as child:
            child.wait_for(f"import '{loaded}'")
            child.send_signal(signal.SIGINT)
            code, text = child.end()
        assert code == 130
        assert "Traceback" not in text


def test_an_interrupt_is_heard_even_in_the_background_of_a_script() -> None:
    with ignored([signal.SIGINT]), children.histospec("replay", "-", stdin=subprocess.PIPE) as child:
        until_it_reads(child)
        child.send_signal(signal.SIGINT)
        assert child.end()[0] == 130


@pytest.mark.parametrize("line", ["", GOOD])
def test_a_signal_that_interrupts_no_read_is_heard(line: str) -> None:
    """As one that comes just before a read waits: another thread gets it, so the read goes on."""
    body = """
    import signal, threading, time
    from histospec.replay.recordings.source import opened, records
    def get_a_signal():
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Thread(target=get_a_signal).start()
    with opened('-') as file:
        list(records(file, ()))
    """
    with Child(sys.executable, "-c", program(body), cwd="/", stdin=subprocess.PIPE) as child:
        assert child.process.stdin is not None
        child.process.stdin.write(line)
        child.process.stdin.flush()
        assert child.end() == (130, "")


def until_it_reads(child: Child) -> None:
    """Returns when the process has read the first line of its standard input, which is short."""
    pipe = child.process.stdin
    assert pipe is not None
    pipe.write(GOOD)
    pipe.flush()
    eventually(lambda: is_empty(pipe.fileno()), "it reads nothing")


def is_empty(descriptor: int) -> bool:
    """Returns whether everything written to a pipe has been read."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0] == 0


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("wrong"), 2, "wrong"),
        (OSError(28, "No space left on device", "file"), 1, "file: no space left on device"),
        (MemoryError(), 1, "out of memory; process less at a time, or provide more memory"),
        (RecursionError(), 1, "the input is nested too deeply"),
        (
            ModuleNotFoundError("No module", name="matplotlib"),
            1,
            "the module matplotlib is missing; install HistoSpec again: pip install 'histospec[all]'",
        ),
        (KeyError("two\nlines"), 1, "unexpected KeyError: 'two\\nlines' (cli.py:"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_whatever_ends_a_command_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    sentence: str | None,
) -> None:
    def broken(words: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", broken)
    assert cli.main(["replay"]) == code
    text = capsys.readouterr().err
    if sentence is None:
        assert text == ""
    else:
        assert text.startswith(f"histospec replay: {sentence}")
        assert text.count("\n") == 1
