"""The process that reads the files of a library: `python -m inweave.serve.sandbox.scan_process`.

    DATABASE [--examine] FOLDER...

It does what `inweave library scan` does, without the command line, which takes longer to import than a scan takes.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from inweave.library import Library


def main(database: str, *folders: str) -> None:
    """Bring the index up to date with the folders; with ``--examine`` before them, also read whole files."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the file being read is not marked as crashing
    examine = folders[:1] == ("--examine",)
    library = Library(Path(database), [Path(folder) for folder in folders[examine:]])
    library.scan()
    if examine:
        library.examine()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:  # the worker stops
        sys.exit(130)
