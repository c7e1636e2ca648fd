"""The pages say what is true: their commands exist and run, their links lead somewhere, their variables are read."""

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from histospec.server.cli import COMMANDS
from tests.support.charts import render
from tests.support.ports import free_port
from tests.support.programs import ROOT
from tests.support.servers import Server

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"),
     *ROOT.glob("helm/*/README.md"),
     *ROOT.glob("examples/*/README.md")]
)  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`")
_OTHERS = "CLIENT_ONLY CONFIG HOST_IP PICTURES PAGE_EPOCHS CHAOS_SEED TEST_SERVER TEST_IMAGE"
ELSEWHERE = {f"HISTOSPEC_{name}" for name in _OTHERS.split()}
"""Variables of the build, the manifests and the tests."""


@cache
def commands() -> list[tuple[str, list[str]]]:
    """Every line of a block and every piece of code in a sentence, as words, with the page that has it."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(body for kind, body in FENCE.findall(text) if kind in ("", "sh", "bash"))
        lines = blocks.replace("\\\n", " ").split("\n") + INLINE.findall(FENCE.sub("", text))
        for line in lines:
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a picture, or half a sentence
                continue
            if words:
                found.append((page.name, words))
    return found


@cache
def help_of(*command: str) -> str:
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert told.returncode == 0, told.stderr
    return told.stdout


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_every_command_of_histospec_takes_what_the_pages_give_it() -> None:
    said = [(page, words) for page, words in commands() if words[0] == "histospec" and len(words) > 1]
    assert len(said) > 15
    for page, (_, name, *rest) in said:
        assert name in COMMANDS or name.startswith("-"), f"{page}: there is no histospec {name}"
        if name in COMMANDS:
            known = help_of(sys.executable, "-m", "histospec.server", name)
            unknown = [flag for flag in flags(rest) if not re.search(rf"{flag}\b", known)]
            assert not unknown, f"{page}: histospec {name} knows no {', '.join(unknown)}"


def test_every_script_takes_what_the_pages_give_it() -> None:
    said = [(page, words) for page, words in commands() if words[0] == "python" and words[1:2] != ["setup.py"]]
    assert said
    for page, (_, *words) in said:
        module = words[:1] == ["-m"]
        script, rest = (words[1].replace(".", "/") + ".py", words[2:]) if module else (words[0], words[1:])
        packaged = module and words[1].startswith("histospec.") and find_spec(f"{words[1]}.__main__")
        assert packaged or (ROOT / script).is_file(), f"{page}: there is no {script}"
        known = help_of(sys.executable, *words[: 1 + module]) if flags(rest) else ""
        assert all(flag in known for flag in flags(rest)), f"{page}: {script} does not take {flags(rest)}"


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, words in commands():
        if words[0] == "make":
            asked = {word for word in words[1:] if re.fullmatch("[a-z-]+", word)}
            assert asked <= targets, f"{page}: make {asked - targets}"


def test_every_helm_command_renders() -> None:
    said = [words for _, words in commands() if words[0] == "helm" and "helm/histospec" in words]
    assert said
    for words in said:
        sets = [word for flag, word in pairwise(words) if flag == "--set"]
        assert render(*(part for value in sets for part in ("--set", value)))


def test_every_variable_is_read_somewhere() -> None:
    known = set(re.findall(r"HISTOSPEC_[A-Z_]+", (ROOT / "docs" / "configuration.md").read_text())) | ELSEWHERE
    known |= set(re.findall(r"HISTOSPEC_[A-Z_]+", (ROOT / "Makefile").read_text()))
    for page in PAGES:
        unknown = set(re.findall(r"HISTOSPEC_[A-Z]+(?:_[A-Z]+)*", page.read_text())) - known
        assert not unknown, f"{page.name}: nothing reads {', '.join(sorted(unknown))}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives its headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_panel_is_on_the_dashboard() -> None:
    dashboard = (ROOT / "helm" / "histospec" / "files" / "dashboard.json").read_text()
    titles = set(re.findall(r'"title": "([^"]+)"', dashboard))
    for page in PAGES:
        for names in re.findall(r'\bpanels?((?:(?:,|\s+and)?\s+"[^"]+")+)', page.read_text()):
            unknown = set(re.findall('"([^"]+)"', names)) - titles
            assert not unknown, f"{page.name}: the dashboard has no panel {', '.join(unknown)}"


def test_troubleshooting_has_every_sentence_that_keeps_vllm_from_starting() -> None:
    """Up to the first value in it, or its first comma."""
    source = (ROOT / "client" / "vllm" / "settings.py").read_text()
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    sentences = []
    for error in raised:
        assert isinstance(error, ast.Call)
        text = error.args[0].values[0] if isinstance(error.args[0], ast.JoinedStr) else error.args[0]
        assert isinstance(text, ast.Constant)
        sentences.append(str(text.value).removeprefix("HistoSpec: ").partition(",")[0])
    assert len(sentences) > 8
    _, _, behind = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## vLLM does not start\n")
    section, _, _ = behind.partition("\n## ")
    missing = [sentence for sentence in sentences if f"`{sentence}" not in section]
    assert not missing


def blocks(page: str, *kinds: str) -> list[str]:
    """The bodies of a page's blocks of these kinds, in order."""
    found = [body for kind, body in FENCE.findall((ROOT / page).read_text()) if kind in kinds]
    assert found
    return found


def runs(command: list[str], folder: Path) -> str:
    """What it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=os.environ | {"PATH": path}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not ran.stderr or command[0] != sys.executable, ran.stderr
    return ran.stdout


def python_of(page: str) -> str:
    """The only block of Python of a page, with a deadline that a slow machine keeps, too."""
    (body,) = blocks(page, "python")
    assert body.count("deadline=1)") == 1
    return body.replace("deadline=1)", "deadline=60)")


def test_the_python_of_the_readme_runs(server: Server, tmp_path: Path) -> None:
    body = python_of("README.md").replace("127.0.0.1:6378", server.endpoint)
    assert "[6 7]" in runs([sys.executable, "-c", body], tmp_path)


def test_the_quickstart_runs(server: Server, tmp_path: Path) -> None:
    def here(body: str) -> str:
        body = body.replace("status 127.0.0.1:6378", f"status 127.0.0.1:6378 --http {server.http}")
        return body.replace("127.0.0.1:6378", server.endpoint).replace("127.0.0.1:9464", server.http)

    assert runs([sys.executable, "-c", here(python_of("docs/quickstart.md"))], tmp_path) == "[7, 8, 9]\n3 responses\n"
    (shown,) = (runs(["bash", "-ec", here(body)], tmp_path) for body in blocks("docs/quickstart.md", "sh"))
    assert "quickstart" in shown  # the namespace
    assert re.search('draft_tokens_total{namespace="quickstart",run="quickstart"} [1-9]', shown)


def test_the_python_says_that_there_is_no_server(tmp_path: Path) -> None:
    """And no traceback."""
    nowhere = f"127.0.0.1:{free_port()}"
    for page, printed in (("README.md", "[] []\n"), ("docs/quickstart.md", "[]\n0 responses\n")):
        body = python_of(page).replace("127.0.0.1:6378", nowhere)
        ran = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (0, printed)
        for line in ran.stderr.splitlines():
            assert line.startswith("HistoSpec: ")
            assert nowhere in line or "1 is lost" in line
        assert "onnection refused" in ran.stderr
