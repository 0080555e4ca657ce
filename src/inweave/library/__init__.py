"""An index of folders with LoRA files: what each one is, by name and by hash, without opening it again."""

from inweave.library.entry import LibraryEntry
from inweave.library.index import Library

__all__ = ["Library", "LibraryEntry"]
