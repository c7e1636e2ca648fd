"""Reads recorded rollouts from files of several formats as problems with their responses (docs/replay.md).

::

    source  ─► records (a line, a row of Parquet) ─► a reader, chosen by the first record ─► grouping ─► problems
    opened, unpacked         checked                documented, frameworks

A reader is a function from records to responses; `recording.FORMATS` lists them. The first record that violates its
format stops the reading with a `RecordingError`, which names the line, the field and the expected value. Files become
one `Recording`, in the order and with the steps that their `names` tell; it also reports the assumptions about them.
`text` tokenizes text, and `tool_text` finds in it what the model did not write.
"""

from histospec.replay.recordings.documented import Line, LineResponse, read_as
from histospec.replay.recordings.names import STDIN
from histospec.replay.recordings.recording import Recording, read
from histospec.replay.recordings.source import is_regular, opened
from histospec.replay.recordings.values import Problem, RecordedResponse, RecordingError, Tokens, Turn, common

__all__ = [
    "STDIN",
    "Line",
    "LineResponse",
    "Problem",
    "RecordedResponse",
    "Recording",
    "RecordingError",
    "Tokens",
    "Turn",
    "common",
    "is_regular",
    "opened",
    "read",
    "read_as",
]
