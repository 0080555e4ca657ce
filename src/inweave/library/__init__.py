"""An index of folders with LoRA files, by name and by hash, so that files need not be opened again."""

from inweave.library.entry import LibraryEntry
from inweave.library.index import Library

__all__ = ["Library", "LibraryEntry"]
