"""An index of folders with LoRA files: what each one is, by name and by hash, without opening it again."""

from inweave.library.entry import Entry
from inweave.library.index import Library

__all__ = ["Entry", "Library"]
