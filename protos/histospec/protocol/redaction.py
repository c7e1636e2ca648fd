"""Keeps secrets out of messages and logs.

A value of an option may hold a secret where none belongs: a URL with a password as an address, or the secret itself as
the name of its file. `quoted` and `file_name` show such a value in a message; `without_secrets` cleans finished texts.
"""

import os
import re
from collections.abc import Sequence

_FLAG = re.compile("-[a-z]|--[a-z]+(-[a-z]+)*")
LONGEST = 60  # characters of a value in a message
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}")
_WORD = re.compile(r"\S+")
_SLASHES = re.compile(":/{1,2}")
_QUERY = re.compile(r"\?[^'\",;)]+")
_SECRET = re.compile(r"(?i)(?<!\.)\b(bearer\s+|(?:password|secret|token)\s*[=:]\s*)[^\s,;]+")
_LOGIN = re.compile(r"[^\s:/'\"]*:[^\s/]*@")


def redacted(value: str) -> str:
    """Returns one value of an option without user, password and query of a URL."""
    head, at, tail = value.rpartition("@")
    if at:
        scheme = _URL.match(head.strip())
        value = f"{scheme[0] if scheme else ''}…@{tail}"
    for mark in "?#":
        head, found, _ = value.partition(mark)
        if found and (at or _URL.match(head)):
            value = f"{head}{mark}…"
    return value


def quoted(value: object) -> str:
    """Returns one value of an option for a message: numbers and texts without secrets; other values as their type."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = redacted(value)
    return repr(text) if len(text) <= LONGEST else f"{text[:LONGEST]!r}… of {len(text)} characters"


def file_name(path: "str | os.PathLike[str]") -> str:
    """Returns the name of a file that holds secrets, for a message.

    A frequent mistake is to give the secret instead of the name of its file, so this shows only what looks like a path.
    """
    text = os.fspath(path)
    if not text.startswith(("/", "./", "../", "~")) and not os.path.lexists(text):
        return "the given file"
    return redacted(text)


def unknown_arguments(words: Sequence[str]) -> str:
    """Returns a message about arguments that a parser does not know, without their values."""
    names = [name for name in (word.partition("=")[0] for word in words) if _FLAG.fullmatch(name)]
    return f"unrecognized arguments: {' '.join(names) or f'{len(words)} without an option'}"


def without_secrets(text: str) -> str:
    """Returns a text without the users, passwords and queries of URLs, and without passwords and tokens.

    Takes time in proportion to the text: callers can put texts of any length into a log.
    """
    if ":/" in text:
        text = _WORD.sub(lambda word: _without_query(_without_user(word[0])), text)
    return _SECRET.sub(r"\1…", text)


def _without_user(word: str) -> str:
    """Returns a text without spaces, with all from the first `:/` to the last `@` left out."""
    slashes, at = _SLASHES.search(word), word.rfind("@")
    return f"{word[: slashes.end()]}…{word[at:]}" if slashes and slashes.end() <= at else word


def _without_query(word: str) -> str:
    """Returns a text without spaces, with the first query after each `:/` left out."""
    kept, start = [], 0
    while (slashes := _SLASHES.search(word, start)) and (mark := word.find("?", slashes.end())) >= 0:
        query = _QUERY.match(word, mark)
        kept += [word[start : mark + 1], "…" if query else ""]
        start = query.end() if query else mark + 1
    return "".join([*kept, word[start:]])


def without_logins(text: str) -> str:
    """Returns a command's message without secrets, and without `user:password@` outside a URL."""
    return _LOGIN.sub("…@", without_secrets(text))
