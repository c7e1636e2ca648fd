"""`python -m histospec.server` is the `histospec` command."""

import sys

from histospec.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
