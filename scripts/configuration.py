"""Writes docs/configuration.md from the code: `python -m scripts.configuration`. A test checks that it is current."""

import ast
import re
import sys
from pathlib import Path

from histospec.server.settings.config import PREFIX, Config
from histospec.server.settings.options import default_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"

SERVER = """\
# Configuration

Written by `python -m scripts.configuration` from the code.

## The server

Every option of `histospec serve` is a flag (`--drain-seconds 5`), an environment variable
(`HISTOSPEC_DRAIN_SECONDS=5`) and a key (`drain-seconds = 5`) of the TOML file that `--config` or `HISTOSPEC_CONFIG`
gives. A flag takes precedence over the environment, and the environment over the file; `--store` and `--store-file`
count as one option. An empty variable counts as absent. An invalid value, an unknown flag or an unknown key stops the
server with exit code 2 and a message.
`histospec snapshot` and `histospec forget` also take the options about the store.

| flag | environment | default | meaning |
|---|---|---|---|
"""

CLIENT = """
## Clients

`DraftClient` and the vLLM adapter read these environment variables. Arguments of `DraftClient` take precedence:

| environment | meaning |
|---|---|
"""

ADAPTER = """
The vLLM adapter also reads:

| environment | meaning |
|---|---|
"""


def page() -> str:
    """Returns the whole page."""
    text = SERVER
    for name, field in Config.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = default_of(name) or "none"
        if field.annotation is bool:
            default = "on" if field.default else "off"
        elif default != "none" and not field.json_schema_extra:
            default = f"`{default}`"
        text += f"| `{flag}` | `{PREFIX}{name.upper()}` | {default} | {_cell(str(field.description))} |\n"
    for head, module in ((CLIENT, "client/config.py"), (ADAPTER, "client/vllm/config.py")):
        source = (ROOT / module).read_text()  # importing the module would import all of vLLM
        said = ast.get_docstring(ast.parse(source))
        text += head
        text += "".join(f"| `{name}` | {_cell(what)} |\n" for name, what in _variables(said or ""))
    return text


def _variables(text: str) -> list[tuple[str, str]]:
    """Returns the rows of the table of variables in a docstring, with continued lines joined."""
    rows: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if found := re.match(rf"({PREFIX}[A-Z_]+)\s*(.*)", line):  # the meaning may begin on the next line
            rows.append((found[1], found[2]))
        elif rows and line.startswith("   "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".lstrip())
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            PAGE.read_text() != page() and "docs/configuration.md is out of date: run python -m scripts.configuration"
        )
    PAGE.write_text(page())
