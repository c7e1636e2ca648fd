"""Runs the `histospec` command as `python -m histospec.server`."""

import sys

from histospec.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
