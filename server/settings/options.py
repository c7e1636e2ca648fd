"""Reads a configuration from flags, environment and file, and reports what is wrong in one sentence.

Every option is a flag, an environment variable and a key of the TOML file: `--drain-seconds 5`,
`HISTOSPEC_DRAIN_SECONDS=5`, `drain-seconds = 5`. A flag wins over the environment, which wins over the file.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

from pydantic import ValidationError

from histospec.protocol.redaction import quoted, redacted
from histospec.server.arguments import ArgumentParser, shown
from histospec.server.errors import ConfigError
from histospec.server.security.watched_files import read_text
from histospec.server.settings.config import PREFIX, Config, StoreConfig, is_size

FLAG = re.compile("--([a-z-]+)")
NAME = re.compile("[a-z]+([-_][a-z]+)*")
AT = re.compile(r"\(at [a-z0-9 ,]+\)$")
LONGEST = 300  # characters of a sentence, which repeats the wrong value
C = TypeVar("C", bound=StoreConfig)


def load(argv: Sequence[str], prog: str = "histospec serve") -> Config:
    """Returns the configuration from flags, environment and file.

    Raises ConfigError with one sentence that names the option and where its value came from.
    """
    return settle(Config, vars(parser(Config, prog, "Start a draft server.").parse_args(list(argv))))


def settle(kind: type[C], flags: dict[str, Any]) -> C:
    """Returns the configuration of type `kind` from flags, environment and file. Raises ConfigError as `load` does."""
    path = flags.pop("config", None) or os.environ.get(f"{PREFIX}CONFIG")
    file = _read(Path(path)) if path else {}
    mine = {name: value for name, value in file.items() if name in kind.model_fields}
    values: dict[str, Any] = {**flags, "_file": mine}
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, flags, mine, path)) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(path: Path) -> dict[str, Any]:
    """Returns the keys of a TOML file, spelled as fields."""
    try:
        content = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"--config {redacted(str(path))}: cannot be read ({error.strerror}); give a readable TOML file"
        ) from None
    except (ValueError, RecursionError) as error:
        place = AT.search(str(error))  # the rest may quote keys, which may hold a misplaced secret
        raise ConfigError(f"--config {path}: is not TOML{' ' + place[0] if place else ''}") from None
    keys = {key: key.replace("-", "_") for key in content}
    for key, name in keys.items():
        if name not in Config.model_fields:
            what = quoted(key) if NAME.fullmatch(key) else "whose name has other characters than options have"
            raise ConfigError(f"--config {path}: unknown option {what}; see histospec serve --help")
    if len(set(keys.values())) < len(keys):
        raise ConfigError(f"--config {path}: an option appears twice, once with - and once with _")
    return {keys[key]: value for key, value in content.items()}


def _sentence(error: ValidationError, flags: Mapping[str, object], file: Mapping[str, object], path: object) -> str:
    """Returns the first error as one sentence."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        named = [flag.replace("-", "_") for flag in FLAG.findall(message.partition(":")[0])]
        return f"{message}{_source(named, flags, file, path)}"
    name = str(first["loc"][0])
    if first["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}"
        if name != "store":  # the only option that may hold a password
            message += f", is {quoted(first['input'])}"
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    return f"{_flag(name)}{_source([name], flags, file, path)}: {message}"


def _source(names: Sequence[str], flags: Mapping[str, object], file: Mapping[str, object], path: object) -> str:
    """Returns where these options were given, for a message that names them as flags; "" for flags."""
    places = []
    for name in names:
        variable = PREFIX + name.upper()
        if name not in flags and (os.environ.get(variable) or name in file):
            places.append(variable if os.environ.get(variable) else str(path))
    return f" (from {' and '.join(dict.fromkeys(places))})" if places else ""


def default_of(name: str, kind: type[StoreConfig] | None = None) -> str:
    """Returns the default of an option as a user would type it, or in words; "" if it has none."""
    field = (kind or Config).model_fields[name]
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["default"])
    if field.default in ("", (), None):
        return ""
    if is_size(field):
        return shown(field.default)
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def parser(kind: type[StoreConfig], prog: str, description: str) -> ArgumentParser:
    """Returns a parser for the flags of a configuration type; flags that are not given are absent from its result."""
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"Every option is also an environment variable ({PREFIX}LISTEN for --listen) and a key of the --config "
        "file (listen). Flags override the environment, which overrides the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="read options from a TOML file")
    for name, field in kind.model_fields.items():
        help_ = str(field.description)
        if field.annotation is bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=help_)
            continue
        if default := default_of(name, kind):
            help_ += f" (default: {default})"
        parser.add_argument(_flag(name), metavar=name.split("_")[-1].upper(), help=help_.replace("%", "%%"))
    return parser
