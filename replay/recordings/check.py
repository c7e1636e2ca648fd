"""Reports what is wrong with a record, as `line 7: responses[2].tokens[17]: what was expected, what is there`."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, from_json

from histospec.protocol.limits import MAX_EPOCH
from histospec.replay.recordings.values import RecordingError

MAX_TOKEN = (1 << 31) - 1
PAGE = "docs/from-your-run-to-a-replay.md"

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def whole(value: Any) -> Any:
    """Returns 3.0 and "3" as 3, also in a list; other values as they are. pandas and CSV make such integers."""
    if isinstance(value, list):
        return [whole(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


def _also_whole(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        return check(whole(value))


_Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Tokens = Annotated[list[_Token], WrapValidator(_also_whole)]
Prompt = Annotated[list[_Token], Field(min_length=1), WrapValidator(_also_whole)]
Epoch = Annotated[int, Field(ge=0, le=MAX_EPOCH), WrapValidator(_also_whole)]
Name = Annotated[str | int, WrapValidator(_also_whole)]

_TOKENS: TypeAdapter[list[int]] = TypeAdapter(Tokens)
_EPOCH: TypeAdapter[int] = TypeAdapter(Epoch)
_NAME: TypeAdapter[str | int] = TypeAdapter(Name)

_NO_INTEGER = ("int_type", "int_from_float", "int_parsing")
_ONE_ARRAY = "write one record a line: jq -c '.[]' FILE"


@dataclass(slots=True)
class Record:
    """One record of a file: a line of JSON, or a row of a table.

    Attributes:
        place: `line 7`, `row 7`.
        content: the bytes of the line; for a row its fields, some of them None.
        ended: False for a last line without a newline, which may be cut short.

    """

    place: str
    content: bytes | dict[str, Any]
    ended: bool = True

    def checked(self, kind: type[M]) -> M:
        """Returns the record as a model. Raises RecordingError."""
        try:
            if isinstance(self.content, bytes):
                try:
                    return kind.model_validate_json(self.content)
                except ValidationError as error:
                    if error.error_count() > 1 or error.errors()[0]["type"] != "json_invalid":
                        raise
                    return kind.model_validate(self._parsed(self.content))
            return kind.model_validate(self.content)
        except ValidationError as error:
            raise self.wrong(explain(error.errors()[0])) from None

    def fields(self) -> dict[str, Any]:
        """Returns the record's fields. Raises RecordingError if it is not a JSON object."""
        if isinstance(self.content, dict):
            return self.content
        fields = self._parsed(self.content)
        if not isinstance(fields, dict):
            raise self.wrong(_no_object(fields))
        self.content = fields
        return fields

    def get(self, field: str) -> Any:
        """Returns the value of a required field. Raises RecordingError."""
        value = self.fields().get(field)
        if value is None:
            raise self.wrong(f"{field}: missing")
        return value

    def epoch(self, field: str) -> int | None:
        """Returns a version of the policy; None if the record has none. Raises RecordingError."""
        return self._optional(_EPOCH, field)

    def name(self, field: str) -> str | int | None:
        """Returns a string or a number; None if the record has none. Raises RecordingError."""
        return self._optional(_NAME, field)

    def tokens(self, field: str, value: Any) -> list[int]:
        """Returns a value of this field as token ids. Raises RecordingError."""
        return self._as(_TOKENS, field, value)

    def wrong(self, what: str) -> RecordingError:
        """Returns an error about this record."""
        return RecordingError(f"{self.place}: {what}")

    def _parsed(self, line: bytes) -> Any:
        """Returns the value of a line of JSON, also of what only Python writes and reads, such as lone surrogates."""
        try:
            return from_json(line)
        except ValueError as error:
            try:
                return json.loads(line.decode())
            except (ValueError, RecursionError):
                raise self.wrong(self._no_json(str(error), line)) from None

    def _no_json(self, why: str, line: bytes) -> str:
        text = f"not JSON: {why}".replace("line 1 column", "column")  # a record is one line
        if "trailing characters" in why:
            return f"{text}; a second record may begin there: jq -c . FILE writes each on its own line"
        if "EOF while parsing" not in why:
            return text
        if not self.ended:
            return f"{text}; the last line is cut short: leave it out"
        return f"{text}; {_ONE_ARRAY if line.lstrip().startswith(b'[') else 'a record must be one line: jq -c . FILE'}"

    def _optional(self, kind: TypeAdapter[T], field: str) -> T | None:
        value = self.fields().get(field)
        return None if value is None else self._as(kind, field, value)

    def _as(self, kind: TypeAdapter[T], field: str, value: Any) -> T:
        try:
            return kind.validate_python(value, strict=True)
        except ValidationError as error:
            found = error.errors()[0]
            raise self.wrong(explain({**found, "loc": (field, *_places(found))})) from None


def explain(error: ErrorDetails) -> str:
    """Returns `responses[2].tokens[17]: what was expected, what is there`."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    kind, value = error["type"], error["input"]
    limits = error.get("ctx", {})
    if kind == "missing":
        return f"{field}: missing"
    if kind == "too_short":
        return f"{field}: must not be empty"
    if kind == "text":
        return f"{field}: {error['msg']}" if field else error["msg"]
    if kind in ("greater_than_equal", "less_than_equal", "less_than"):
        limit = "2^63 - 1" if kind == "less_than" else next(iter(limits.values()))
        return f"{field}: {shown(value)} is {'below' if kind == 'greater_than_equal' else 'above'} the limit {limit}"
    if not field:
        return _no_object(value)
    what = "should be a valid integer" if kind in _NO_INTEGER else error["msg"].removeprefix("Input ")
    hint = f"; text is read where each record is one response ({PAGE})" if _is_text(kind, value) else ""
    return f"{field}: {what}, is {shown(value)}{hint}"


def shown(value: object) -> str:
    """Returns a value as text, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _places(error: ErrorDetails) -> tuple[int | str, ...]:
    """Returns the path in a value, without the names that pydantic gives to alternatives of a union."""
    return tuple(part for part in error["loc"] if isinstance(part, int))


def _is_text(kind: str, value: object) -> bool:
    return kind in ("list_type", "model_type", "model_attributes_type") and isinstance(value, str)


def _no_object(value: object) -> str:
    text = f"record: should be an object, is {shown(value)}"
    return f"{text}; {_ONE_ARRAY}" if isinstance(value, list) else text
