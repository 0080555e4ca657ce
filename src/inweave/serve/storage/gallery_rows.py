"""The rows of the gallery: which images there are, and the questions that lists and searches ask.

    writing -> present <-> trashed                    an image of a job has its row before its file is written
               present <-> missing                    the file was removed, or came back, without this worker

Rows belong to an account and to a folder: the images of one are never part of a list of another. ``words`` holds what a
search looks at, in lower case. A list is ordered by (created, number), newest first, and continues after a cursor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from inweave.errors import ConfigError, MissingError, Problem
from inweave.serve.jobs.sql import Database
from inweave.serve.storage import gallery_albums as albums

State = Literal["writing", "present", "trashed", "missing"]
SCHEMA = """
CREATE TABLE IF NOT EXISTS gallery (
    number {number},
    id TEXT NOT NULL UNIQUE,
    account TEXT NOT NULL,
    folder TEXT NOT NULL,
    path TEXT NOT NULL,
    state TEXT NOT NULL,
    job TEXT NOT NULL,
    place BIGINT NOT NULL,
    created DOUBLE PRECISION NOT NULL,
    added DOUBLE PRECISION NOT NULL,
    changed DOUBLE PRECISION NOT NULL,
    bytes BIGINT NOT NULL,
    modified DOUBLE PRECISION NOT NULL,
    sha256 TEXT NOT NULL,
    format TEXT NOT NULL,
    width BIGINT NOT NULL,
    height BIGINT NOT NULL,
    prompt TEXT NOT NULL,
    negative TEXT NOT NULL,
    model TEXT NOT NULL,
    seed TEXT NOT NULL,
    loras TEXT NOT NULL,
    starred BIGINT NOT NULL DEFAULT 0,
    words TEXT NOT NULL,
    UNIQUE (folder, path)
);
CREATE INDEX IF NOT EXISTS gallery_by_time ON gallery (folder, account, state, created DESC, number DESC);
CREATE INDEX IF NOT EXISTS gallery_by_job ON gallery (job, place);
CREATE INDEX IF NOT EXISTS gallery_by_content ON gallery (sha256);
"""
VERSION = 1
MAX_LIMIT = 200
_CURSOR = re.compile(r"(-?[0-9.e+]{1,40}):([0-9]{1,18})")
_ESCAPED = re.compile(r"([!%_])")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a row says of an image; ``loras``: their names."""

    format: str
    width: int
    height: int
    prompt: str = ""
    negative: str = ""
    model: str = ""
    seed: str = ""
    loras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GalleryImage:
    """One row: an image and its file, ``path`` below the folder of the gallery.

    ``job``: the one that made it and the ``place`` in its result; "" for files that were imported or found.
    """

    number: int
    id: str
    account: str
    path: str
    state: State
    job: str
    place: int
    created: float
    added: float
    changed: float
    bytes: int
    modified: float
    sha256: str
    starred: bool
    facts: ImageFacts
    albums: tuple[str, ...] = ()

    @property
    def cursor(self) -> str:
        """Where a list continues after this image."""
        return f"{self.created!r}:{self.number}"

    def as_dict(self) -> dict[str, Any]:
        """Return the image as clients get it."""
        facts, at = self.facts, f"/v1/gallery/{self.id}"
        version = f"v={self.modified:.6f}"
        return {
            "id": self.id, "name": self.path.rpartition("/")[2], "path": self.path, "created": self.created,
            "width": facts.width, "height": facts.height, "bytes": self.bytes, "prompt": facts.prompt,
            "negative_prompt": facts.negative, "model": facts.model, "seed": facts.seed, "loras": [*facts.loras],
            "starred": self.starred, "albums": [*self.albums], "job": self.job or None, "place": self.place,
            "trashed": self.state == "trashed", "url": f"{at}/file?{version}", "thumbnail": f"{at}/thumbnail?{version}",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class GalleryQuery:
    """A question for images; None and "" mean any.

    ``text``: words that all have to be in the prompt, the model, a LoRA or the name of the file.
    """

    text: str = ""
    lora: str = ""
    model: str = ""
    starred: bool = False
    album: str = ""
    job: str = ""
    trashed: bool = False
    cursor: str = ""
    limit: int = 50


_PLAIN = tuple(each.name for each in fields(GalleryImage) if each.name not in ("facts", "albums"))
_FACTS = tuple(each.name for each in fields(ImageFacts))
COLUMNS = ", ".join((*_PLAIN, *_FACTS))


@dataclass(slots=True)
class _Where:
    """A condition and its values."""

    parts: list[str] = field(default_factory=list)
    values: list[object] = field(default_factory=list)

    def add(self, part: str, *values: object) -> None:
        self.parts.append(part)
        self.values += values

    def __str__(self) -> str:
        return " AND ".join(self.parts)


class GalleryRows:
    """The tables of one folder; ``folder``: its random name. Safe to call from several threads."""

    def __init__(self, database: Database, folder: str) -> None:
        self.db, self.folder = database, folder
        database.prepare("gallery", VERSION, SCHEMA + albums.SCHEMA, {})
        self.albums = albums.Albums(database, folder)

    # lists

    def images(self, account: str, query: GalleryQuery) -> list[GalleryImage]:
        """Return the images of an account that a query asks for, newest first; raise ConfigError for a bad cursor."""
        where = self._where(account, query)
        if query.cursor:
            created, number = _cursor(query.cursor)
            where.add("(created < ? OR (created = ? AND number < ?))", created, created, number)
        limit = max(1, min(query.limit, MAX_LIMIT))
        text = f"SELECT {COLUMNS} FROM gallery WHERE {where} ORDER BY created DESC, number DESC LIMIT ?"
        return self._with_albums([image_of(row) for row in self.db.execute(text, *where.values, limit).rows])

    def count(self, account: str, query: GalleryQuery) -> int:
        """Return how many images a query asks for, whatever its cursor."""
        where = self._where(account, query)
        return int(self.db.execute(f"SELECT count(*) FROM gallery WHERE {where}", *where.values).value())

    def _where(self, account: str, query: GalleryQuery) -> _Where:
        where = _Where()
        where.add("folder = ? AND account = ?", self.folder, account)
        where.add("state = ?", "trashed" if query.trashed else "present")
        for word in query.text.lower().split()[:20]:
            where.add("words LIKE ? ESCAPE '!'", f"%{_escaped(word)}%")
        if query.lora:
            where.add("loras LIKE ? ESCAPE '!'", f"%\n{_escaped(query.lora)}\n%")
        for name, value in (("model", query.model), ("job", query.job)):
            if value:
                where.add(f"{name} = ?", value)
        if query.starred:
            where.add("starred = 1")
        if query.album:
            where.add("id IN (SELECT image FROM album_images WHERE album = ?)", query.album)
        return where

    def _with_albums(self, images: list[GalleryImage]) -> list[GalleryImage]:
        """Return images with the ids of their albums."""
        if not images:
            return images
        marks = ", ".join("?" * len(images))
        query = f"SELECT image, album FROM album_images WHERE image IN ({marks}) ORDER BY album"
        names: dict[str, list[str]] = {}
        for image, album in self.db.execute(query, *(each.id for each in images)).rows:
            names.setdefault(image, []).append(album)
        return [replace(each, albums=tuple(names.get(each.id, ()))) for each in images]

    def image(self, account: str, image: str) -> GalleryImage:
        """Return an image of an account; raise MissingError if it has none of this id."""
        query = f"SELECT {COLUMNS} FROM gallery WHERE id = ? AND folder = ? AND account = ?"
        row = self.db.execute(query, image, self.folder, account).first()
        if row is None or row[_PLAIN.index("state")] not in ("present", "trashed"):
            raise MissingError(f"there is no image {image[:100]} in the gallery")
        return self._with_albums([image_of(row)])[0]

    def of_job(self, job: str, place: int) -> GalleryImage | None:
        """Return the image of a place in a job, in any state."""
        query = f"SELECT {COLUMNS} FROM gallery WHERE job = ? AND place = ? AND folder = ?"
        row = self.db.execute(query, job, place, self.folder).first()
        return None if row is None else image_of(row)

    def in_states(self, *states: State) -> list[GalleryImage]:
        """Return the images of all accounts in these states, oldest first."""
        marks = ", ".join("?" * len(states))
        query = f"SELECT {COLUMNS} FROM gallery WHERE folder = ? AND state IN ({marks}) ORDER BY added, number"
        return [image_of(row) for row in self.db.execute(query, self.folder, *states).rows]

    def of_content(self, sha256: str, *states: State) -> list[GalleryImage]:
        """Return the images of all accounts with these bytes, in these states."""
        marks = ", ".join("?" * len(states))
        query = f"SELECT {COLUMNS} FROM gallery WHERE sha256 = ? AND folder = ? AND state IN ({marks}) ORDER BY number"
        return [image_of(row) for row in self.db.execute(query, sha256, self.folder, *states).rows]

    def at(self, path: str) -> GalleryImage | None:
        """Return the image whose file has a path, in any state."""
        row = self.db.execute(f"SELECT {COLUMNS} FROM gallery WHERE folder = ? AND path = ?", self.folder, path).first()
        return None if row is None else image_of(row)

    def path_is_free(self, path: str, image: str) -> bool:
        """Return whether no other image than this one has a path."""
        known = self.at(path)
        return known is None or known.id == image

    def stamps(self) -> dict[str, tuple[str, State, int, float]]:
        """Return (id, state, size, time of change) of every image of the folder by its path."""
        query = "SELECT path, id, state, bytes, modified FROM gallery WHERE folder = ?"
        return {row[0]: (row[1], row[2], row[3], row[4]) for row in self.db.execute(query, self.folder).rows}

    def total_bytes(self) -> int:
        """Return the size of all images of the folder, those in the trash included."""
        query = "SELECT coalesce(sum(bytes), 0) FROM gallery WHERE folder = ? AND state <> 'missing'"
        return int(self.db.execute(query, self.folder).value())

    def facets(self, account: str) -> dict[str, Any]:
        """Return the models and LoRAs of an account's images with their numbers, and totals."""
        present = "folder = ? AND account = ? AND state = 'present'"
        at = (self.folder, account)
        models = self.db.execute(
            f"SELECT model, count(*) FROM gallery WHERE {present} AND model <> '' GROUP BY model", *at
        ).rows
        loras: dict[str, int] = {}
        query = f"SELECT loras, count(*) FROM gallery WHERE {present} AND loras <> '' GROUP BY loras"
        for names, number in self.db.execute(query, *at).rows:
            for name in names.strip("\n").split("\n"):
                loras[name] = loras.get(name, 0) + number
        query = f"SELECT count(*), coalesce(sum(bytes), 0), coalesce(sum(starred), 0) FROM gallery WHERE {present}"
        number, size, starred = self.db.execute(query, *at).rows[0]
        return {
            "images": int(number), "bytes": int(size), "starred": int(starred),
            "trashed": self.count(account, GalleryQuery(trashed=True)), "models": _counted(dict(models)),
            "loras": _counted(loras),
        }  # fmt: skip

    # changes

    def insert(self, image: GalleryImage) -> bool:
        """Store a new row; return False if its path is taken. The number of the row is its own."""
        names = [name for name in (*_PLAIN, *_FACTS) if name != "number"]
        marks = ", ".join("?" * (len(names) + 2))
        query = f"INSERT INTO gallery ({', '.join(names)}, folder, words) VALUES ({marks}) ON CONFLICT DO NOTHING"
        values = _values(image)
        return self.db.execute(query, *(values[name] for name in names), self.folder, _words(image)).changed == 1

    def update(self, image: GalleryImage) -> None:
        """Store everything that a row says anew."""
        names = [name for name in (*_PLAIN, *_FACTS) if name not in ("number", "id")]
        change = f"UPDATE gallery SET {', '.join(f'{name} = ?' for name in names)}, words = ? WHERE id = ?"
        values = _values(image)
        self.db.execute(change, *(values[name] for name in names), _words(image), image.id)

    def move(self, image: str, state: State, path: str, now: float) -> None:
        """Store the state and the path of an image."""
        change = "UPDATE gallery SET state = ?, path = ?, changed = ? WHERE id = ?"
        self.db.execute(change, state, path, now, image)

    def remove(self, image: str) -> None:
        """Forget an image."""
        with self.db.transaction():
            self.db.execute("DELETE FROM album_images WHERE image = ?", image)
            self.db.execute("DELETE FROM gallery WHERE id = ?", image)

    def star(self, account: str, images: Sequence[str], starred: bool) -> int:
        """Star images, or remove their stars; return how many there are."""
        marks = ", ".join("?" * len(images))
        change = f"UPDATE gallery SET starred = ? WHERE folder = ? AND account = ? AND id IN ({marks})"
        return self.db.execute(change, int(starred), self.folder, account, *images).changed

    def next_number(self) -> int:
        """Return the number that the next row will have, or a smaller one."""
        return int(self.db.execute("SELECT coalesce(max(number), 0) + 1 FROM gallery").value())


def image_of(row: Sequence[Any]) -> GalleryImage:
    """Return the image in a row of ``COLUMNS``."""
    values: dict[str, Any] = dict(zip((*_PLAIN, *_FACTS), row, strict=True))
    values["starred"] = bool(values["starred"])
    values["loras"] = tuple(name for name in values["loras"].split("\n") if name)
    facts = ImageFacts(**{name: values.pop(name) for name in _FACTS})
    return GalleryImage(**values, facts=facts)


def _values(image: GalleryImage) -> dict[str, Any]:
    values = {name: getattr(image, name) for name in _PLAIN} | {name: getattr(image.facts, name) for name in _FACTS}
    names = [name.replace("\n", " ") for name in image.facts.loras]
    return values | {
        "starred": int(image.starred),
        "loras": "".join(f"\n{name}" for name in names) + "\n" * bool(names),
    }


def _words(image: GalleryImage) -> str:
    facts = image.facts
    name = image.path.removeprefix(".trash/").rpartition("/")[2]
    return "\n".join((facts.prompt, facts.negative, facts.model, facts.seed, *facts.loras, name)).lower()


def _escaped(text: str) -> str:
    """Return a text that LIKE compares as written."""
    return _ESCAPED.sub(r"!\1", text)


def _cursor(text: str) -> tuple[float, int]:
    try:
        match = _CURSOR.fullmatch(text)
        assert match is not None
        return float(match[1]), int(match[2])
    except (AssertionError, ValueError):
        raise ConfigError(Problem("cursor", f"expected the `next` of another answer, got {text[:60]!r}")) from None


def _counted(numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return names with their numbers, the most frequent first."""
    rows = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return [{"name": name, "images": int(number)} for name, number in rows[:200]]
