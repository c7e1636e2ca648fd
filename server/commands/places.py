"""Finds the place of a snapshot: a file, or a folder or object-store URL with dated snapshots."""

import os

from histospec.server.commands.buckets import Bucket
from histospec.server.commands.folders import Folder
from histospec.server.commands.place import Place

FILES = (".jsonl", ".jsonl.gz")


def place(target: str) -> tuple[Place, str] | None:
    """Returns the place of a target and the name in it, "" for dated snapshots; None for a plain file.

    An existing folder, or a name that ends with a slash, holds dated snapshots. So does a URL, unless it ends like a
    snapshot file. Raises ConfigError.
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
