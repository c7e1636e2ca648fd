"""Where snapshots lie: a file, or dated ones in a folder or under a URL of an object store."""

import os

from histospec.server.commands.buckets import Bucket
from histospec.server.commands.folders import Folder
from histospec.server.commands.place import Place

FILES = (".jsonl", ".jsonl.gz")


def place(target: str) -> tuple[Place, str] | None:
    """The place that a target names, and the name there, "" for dated ones; None for a plain file.

    A folder that exists, or a name that ends in a slash, holds dated snapshots; so does a URL, unless it ends as a
    snapshot does. Raises ConfigError.
    """
    scheme, slashes, rest = target.partition("://")
    if slashes:
        head, _, last = rest.rpartition("/")
        if head and last.endswith(FILES):
            return Bucket(f"{scheme}://{head}"), last
        return Bucket(target), ""
    if target.endswith("/") or os.path.isdir(target):
        return Folder(target), ""
    return None
