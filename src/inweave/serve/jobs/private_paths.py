"""Texts without the paths of this machine: files are shown by the names that clients know them by.

    /srv/loras/styles/pixel.safetensors: no such file    ->  styles/pixel.safetensors: no such file
    /srv/models/sd15: no model_index.json                ->  sd15: no model_index.json

Each process names its folders when it starts: those of the library, of the data, the parents of models and datasets.
The folders of the system are known: those of the package, of Python, of this user and of temporary files. A message can
only hold a path that the process opened, and those are all below one of these folders. All other text is kept, also
what a client wrote that looks like a path.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from inweave.files.paths import printable_path


class PrivatePaths:
    """The folders of one process. Safe for threads: the table is replaced, never changed."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._folders: tuple[str, ...] = ()
        self.add(folders)

    def add(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        """Name more folders; relative ones and the root are not shown as prefixes, and so not needed."""
        known = set(self._folders)
        for folder in folders:
            for path in {Path(folder).expanduser(), Path(os.path.realpath(Path(folder).expanduser()))}:
                if path.is_absolute() and path.name:
                    known |= {str(path), printable_path(path)}
        self._folders = tuple(sorted(known, key=lambda folder: (-len(folder), folder)))

    def public(self, text: str) -> str:
        """Return a text with the files below the folders relative to them, and the folders by their last part."""
        for folder in self._folders:
            if folder in text:
                text = text.replace(f"{folder}/", "").replace(folder, Path(folder).name)
        return text


PATHS = PrivatePaths((
    Path(__file__).parents[3], sys.prefix, sys.base_prefix, tempfile.gettempdir(), Path.home(), "/proc/self/fd",
    *filter(None, (os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME"))),
))  # fmt: skip


def public(text: str) -> str:
    """Return a text as clients may see it."""
    return PATHS.public(text)
