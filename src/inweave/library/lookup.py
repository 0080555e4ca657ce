"""Files of the library by name, path, id or hash.

id      lora-5f3a...
path    styles/pixel, with or without its ending; a path of this machine must begin with a folder of the library
name    pixel: the name of the file, then the name that its trainer recorded
hash    SHA-256, AutoV1, AutoV2 or AutoV3, with or without its kind: autov2:8845bf35ff

Names are compared literally, then with composed letters: macOS stores accents separately.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.exchange.hashes import KINDS, hash_digits
from inweave.library.database import Database, composed, folded
from inweave.library.entry import LibraryEntry
from inweave.library.walk import is_unicode

_ATTEMPTS = 3
_MAX_WORDS = 50


class Lookup(Database, ABC):
    """Queries of the index. Entries for use (`get`, `find`) were compared with their files on the disk."""

    def get(self, entry: str) -> LibraryEntry:
        """Return the entry with an id; raise MissingError if its file is gone or was replaced by another."""
        former = self._one("SELECT id FROM former WHERE former = ?", entry)
        for _ in range(_ATTEMPTS):  # a file with a new mode or link is read again, and keeps its id
            for row in self._entries("id = ?", former[0] if former is not None else entry):
                if self._confirm(row):
                    return row
        raise MissingError(f"LoRA {entry}: not in the library, or its file was replaced by another")

    def identity(self, entry: LibraryEntry) -> dict[str, Any]:
        """Return what `recognize` finds the same file by in the index of another machine."""
        row = self._one("SELECT sample FROM files WHERE id = ?", entry.id)
        sha256 = entry.contents.sha256 if entry.contents is not None else None
        return {"size": entry.size, "sample": None if row is None else row[0], "sha256": sha256}

    def recognize(self, size: int, sample: str | None, sha256: str | None) -> LibraryEntry | None:
        """Return an entry with the content of a file of another machine, by what is known of it."""
        for entry in self._entries("size = ? AND sample = ?", size, sample):
            known = entry.contents.sha256 if entry.contents is not None else None
            if (sha256 is None or known in (None, sha256)) and self._confirm(entry):
                return entry
        return None

    def find(self, reference: str) -> LibraryEntry:
        """Return the entry of a name, a path below a folder, an id or a hash.

        A file that was replaced since the last scan is read again first.

        Raises:
            MissingError: there is no such file, or it is gone.
            ConflictError: several files match.
        """
        if not is_unicode(reference):
            raise MissingError(f"LoRA {ascii(reference[:200])[1:-1]}: not in the library; names are Unicode")
        for _ in range(_ATTEMPTS):
            entry = self._find(reference)
            if self._confirm(entry):
                return entry
        raise MissingError(f"LoRA {reference[:200]}: its file keeps changing; try again when it is written")

    @abstractmethod
    def _confirm(self, entry: LibraryEntry) -> bool:
        """Return whether the file of an entry is the indexed one; otherwise update the index."""

    def _find(self, reference: str) -> LibraryEntry:
        text = reference
        kind, colon, digits = text.lower().partition(":")
        if colon and kind in KINDS.values() and (rows := self._entries(f"{kind} = ?", digits)):
            return self._only(reference, rows)
        path = text.replace("\\", "/")
        if rows := self._at(path):
            return self._only(reference, rows)
        path = path.removeprefix("./")
        name = text.removesuffix(".safetensors")
        for where, value in (
            ("id = ?", text),
            ("id = (SELECT id FROM former WHERE former = ?)", text),
            ("path = ?", path),
            ("path = ?", f"{path}.safetensors"),
            ("name = ?", name),
            ("alias = ?", text),
            ("composed(path) = ?", composed(path)),
            ("composed(path) = ?", composed(f"{path}.safetensors")),
            ("composed(name) = ?", composed(name)),
        ):
            if rows := self._entries(where, value):
                return self._only(reference, rows)
        digest = hash_digits(text)
        rows = self._entries(f"{KINDS[len(digest)]} = ?", digest) if digest is not None else []
        return self._only(reference, rows)

    def _at(self, path: str) -> list[LibraryEntry]:
        """Return the entry at a path of this machine, which must begin with a folder of the library."""
        whole = posixpath.normpath(str(Path(path).expanduser()) if path.startswith("~/") else path)
        for folder in self.folders:
            if whole.startswith(f"{folder}/"):
                below = whole.removeprefix(f"{folder}/")
                if rows := self._entries("root = ? AND path IN (?, ?)", str(folder), below, f"{below}.safetensors"):
                    return rows[:1]
        return []

    def _leads_out(self, reference: str) -> bool:
        """Return whether a reference is a path that no folder holds; the disk is not asked."""
        path = reference.replace("\\", "/")
        if path.startswith("~") or re.match(r"[A-Za-z]:/|file:", path):
            return True
        whole = posixpath.normpath(path)
        return whole.startswith(("/", "../")) and not any(whole.startswith(f"{folder}/") for folder in self.folders)

    def _only(self, reference: str, rows: list[LibraryEntry]) -> LibraryEntry:
        if len({row.contents.sha256 if row.contents else row.id for row in rows}) > 1:
            first = [row for row in rows if row.root != str(self.folders[-1])]
            if len(first) != 1:
                same_path = len({row.path for row in rows}) < len(rows)  # in several folders
                names = [f"{row.path} ({row.id})" if same_path else row.path for row in rows[:5]]
                raise ConflictError(
                    f"LoRA {reference[:200]}: several files have this name: {', '.join(names)}; "
                    f"name one by its {'id' if same_path else 'path'} or hash"
                )
            rows = first
        if not rows and self._leads_out(reference):
            raise MissingError(
                f"LoRA {reference[:200]}: a path outside the folders of the library; name a file in them, by its name, "
                "by its path below its folder, or by hash"
            )
        if not rows:
            raise MissingError(f"LoRA {reference[:200]}: not in the library{self._hint(reference)}")
        return rows[0]

    def _hint(self, reference: str) -> str:
        marks = ", ".join("?" * len(self.folders))
        query = f"SELECT DISTINCT name FROM files WHERE present = 1 AND root IN ({marks}) LIMIT 5000"
        names = {folded(row[0]): row[0] for row in self._query(query, *map(str, self.folders))}
        near = difflib.get_close_matches(folded(reference[:100]), names, 1)
        return f"; did you mean {names[near[0]]!r}?" if near else ""

    def entries(
        self, text: str = "", *, base: str | None = None, limit: int = 100_000, offset: int = 0
    ) -> list[LibraryEntry]:
        """Return entries by name; each word of ``text`` must be in a path, an alias or a trigger word, in any case."""
        where, values = ["1"], list[Any]()
        if base is not None:
            where.append("base = ?")
            values.append(base)
        text = text.encode("utf-8", "replace").decode()  # unpaired surrogates of a command line are not in any name
        words = folded(text).split()
        if len(words) > _MAX_WORDS:
            raise ConfigError(f"a search takes at most {_MAX_WORDS} words, got {len(words):,}")
        for word in words:
            where.append("(instr(fold(path), ?) OR instr(fold(alias), ?) OR "
                         "instr(fold(trigger_words(json_extract(facts, '$.triggers'))), ?))")  # fmt: skip
            values += [word] * 3
        return self._entries(" AND ".join(where), *values, tail=f"ORDER BY name, path LIMIT {limit} OFFSET {offset}")

    def has_name(self, name: str) -> bool:
        """Return whether a file of any folder has a name."""
        return bool(self._entries("composed(name) = ?", composed(name)))

    def count(self) -> int:
        """Return the number of files."""
        marks = ", ".join("?" * len(self.folders))
        query = f"SELECT count(*) FROM files WHERE present = 1 AND root IN ({marks})"
        return int(self._query(query, *map(str, self.folders))[0][0])

    def duplicates(self) -> list[list[LibraryEntry]]:
        """Return groups of files with the same tensors, regardless of their names and metadata."""
        groups: dict[str, list[LibraryEntry]] = {}
        for entry in self.entries():
            if entry.contents is not None and entry.contents.autov3:
                groups.setdefault(entry.contents.autov3, []).append(entry)
        return [group for group in groups.values() if len(group) > 1]

    def twins(self, entry: LibraryEntry) -> list[str]:
        """Return the paths of other files with the same tensors."""
        if entry.contents is None or not entry.contents.autov3:
            return []
        return [row.path for row in self._entries("autov3 = ? AND id != ?", entry.contents.autov3, entry.id)]
