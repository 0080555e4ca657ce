"""The gallery on disk: images as ordinary files in one folder, and a row for each (`gallery_rows`).

    <folder>/2026-11-19/7-a-red-apple.png     an image, named by a pattern (`inweave.serve.gallery_names`)
    <folder>/imported/...                     images that clients sent
    <folder>/@alice/...                       the same for the account alice
    <folder>/.trash/<id>/...                  deleted images, for ``TRASH_SECONDS``
    <folder>/.inweave-gallery                 a random name: without it the folder is not the one of the rows
    <thumbnails>/<id>.webp                    small copies, made by the first request for them

The row of a job's image is stored before its file is written, and completed afterwards, so that a process that is
killed in between leaves no image without its job. Files may be copied, moved, edited and removed by other programs:
`changes` compares the folder with the rows. A file that was moved keeps its stars and albums, by its content.

Nothing is deleted unless a limit of days or bytes is set. Limits apply to images that jobs made, oldest first; images
with a star or in an album stay, and so does every file that was imported or found. Imports beyond a limit of bytes are
refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inweave.errors import ConflictError, MissingError
from inweave.files.writing import write_atomic
from inweave.serve.gallery_names import DEFAULT_NAMES, MAX_PARTS, file_path, visible_name
from inweave.serve.jobs.clock import AgeClock
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.sql import Database, SqliteDatabase
from inweave.serve.storage.gallery_folder import ENDINGS, image_files, read_file, remove_empty
from inweave.serve.storage.gallery_rows import GalleryImage, GalleryRows, ImageFacts, State

MARKER = ".inweave-gallery"
TRASH = ".trash"
IMPORTED = "imported"
TRASH_SECONDS = 7 * 24 * 3600.0
#: rows of files that were removed by other programs, whose stars and albums return with them
MISSING_SECONDS = 90 * 24 * 3600.0
#: rows that are still being written may be those of another process
LOST_SECONDS = 3600.0
SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}


#: the size and the time of change of a file
Stamp = tuple[int, float]


@dataclass(slots=True)
class Changes:
    """What other programs did to the folder: files that have to be read, and numbers of the rest."""

    files: list[tuple[str, str, Stamp]] = field(default_factory=list)  # (account, path, stamp)
    missing: int = 0
    returned: int = 0


class GalleryStore:
    """The gallery of a worker. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        thumbnails: Path,
        *,
        names: str = DEFAULT_NAMES,
        keep_seconds: float | None = None,
        keep_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
        database: Database | None = None,
        data: Path | None = None,
    ) -> None:
        """Open the gallery in a folder; ``data``: of the database, without one that several workers share."""
        self.folder, self.thumbnails = folder, thumbnails
        self._names, self._keep_seconds, self._keep_bytes = names, keep_seconds, keep_bytes
        self._clock, self._age_clock = clock or time.time, clock or AgeClock()
        self._lock = threading.Lock()
        self._unreadable: dict[str, Stamp] = {}  # files that hold no image
        folder.mkdir(parents=True, exist_ok=True)
        thumbnails.mkdir(parents=True, exist_ok=True)
        marker = folder / MARKER
        if not marker.is_file():
            write_atomic(marker, [f"{secrets.token_hex(16)}\n".encode()], error=StorageError)
        self._name = marker.read_text().strip()
        self.rows = GalleryRows(database or SqliteDatabase((data or folder) / "gallery.sqlite3"), self._name)
        self._settle(0.0 if not self.rows.db.shared else LOST_SECONDS)

    def close(self) -> None:
        """Close the database."""
        self.rows.db.close()

    def ensure_there(self) -> None:
        """Raise StorageError if the folder is not the one of the rows: its disk may not be mounted any more."""
        try:
            name = (self.folder / MARKER).read_text().strip()
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"the folder of the gallery cannot be read: {reason}; is its disk mounted?") from None
        if name != self._name:
            raise StorageError("the folder of the gallery is another one than at the start; restart the worker")

    # images

    def add(
        self, job: str, account: str, place: int, content: bytes, facts: ImageFacts, settings: Mapping[str, Any],
        created: float | None = None,
    ) -> GalleryImage:  # fmt: skip
        """Store an image that a job made; one that an earlier attempt stored is replaced.

        Args:
            job: its id.
            account: of the job, "" without one.
            place: of the image in the job's result.
            content: a PNG.
            facts: for the row.
            settings: for the name: fields of `GenerateConfig` and ``model``.
            created: the time by which lists are ordered; default: now.

        Raises:
            StorageError: the disk is full, or the folder cannot be written.
        """
        self.ensure_there()
        digest, now = hashlib.sha256(content).hexdigest(), self._clock()
        made = now if created is None else created
        known = self.rows.of_job(job, place)
        if known is not None and known.state == "trashed":
            return known
        if known is None:
            name = file_path(self._names, {**settings, "job": job}, made, self.rows.next_number(), place)
            image = GalleryImage(
                0,
                _new_id(),
                account,
                "",
                "writing",
                job,
                place,
                made,
                now,
                now,
                len(content),
                0.0,
                digest,
                False,
                facts,
            )
            image = self._reserved(image, name, SUFFIXES[facts.format])
        else:
            image = replace(known, state="writing", changed=now, bytes=len(content), sha256=digest, facts=facts)
            self.rows.update(image)
        self._write(image.path, content)
        return self._completed(image)

    def import_image(
        self, account: str, name: str, content: bytes, facts: ImageFacts, created: float | None = None
    ) -> tuple[GalleryImage, bool]:
        """Return (an image that a client sent, whether it is new): the same bytes are stored once per account."""
        self.ensure_there()
        digest, now = hashlib.sha256(content).hexdigest(), self._clock()
        for known in self.rows.of_content(digest, "present"):
            if known.account == account and (self.folder / known.path).is_file():
                return known, False
        if self._keep_bytes is not None and self.rows.total_bytes() + len(content) > self._keep_bytes:
            size = self._keep_bytes / 1024**3
            raise ConflictError(
                f"the gallery may hold {size:g} GB (--picture-gb); delete some images, or raise the limit"
            )
        made = now if created is None else min(created, now)
        parts = [visible_name(part) for part in name.replace("\\", "/").split("/") if part.strip(" .")] or ["image"]
        stem = Path(parts[-1]).stem if Path(parts[-1]).suffix.lower() in ENDINGS else parts[-1]
        path = "/".join((IMPORTED, *parts[:-1][-MAX_PARTS:], visible_name(stem)))
        image = GalleryImage(
            0, _new_id(), account, "", "writing", "", 0, made, now, now, len(content), 0.0, digest, False, facts
        )
        image = self._reserved(image, path, SUFFIXES[facts.format])
        self._write(image.path, content)
        with contextlib.suppress(OSError):
            os.utime(self.folder / image.path, (made, made))
        return self._completed(image), True

    def _reserved(self, image: GalleryImage, path: str, suffix: str) -> GalleryImage:
        """Store the row of an image under the first free name; its file does not exist yet."""
        start = f"@{image.account}/" if image.account else ""
        for number in range(1, 100_000):
            name = f"{start}{path}{'' if number == 1 else f'-{number}'}{suffix}"
            if not os.path.lexists(self.folder / name) and self.rows.insert(replace(image, path=name)):
                return replace(image, path=name)
        raise StorageError("no name is free in the gallery; use [number] or [seed] in --picture-names")

    def _write(self, path: str, content: bytes) -> None:
        target = self.folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"a folder of the gallery cannot be made: {error.strerror or error}") from None
        write_atomic(target, [content], error=StorageError)

    def _completed(self, image: GalleryImage) -> GalleryImage:
        """Store that the file of an image is there."""
        status = (self.folder / image.path).stat()
        image = replace(image, state="present", bytes=status.st_size, modified=status.st_mtime, changed=self._clock())
        self.rows.update(image)
        return image

    def read(self, path: str) -> bytes:
        """Return the bytes of an image file; raise MissingError if it is gone or is not a regular file."""
        return read_file(self.folder, path)

    def thumbnail(self, image: GalleryImage) -> Path:
        """Return the path of an image's small copy, which may not exist yet."""
        return self.thumbnails / image.id[-2:] / f"{image.id}-{image.modified:.6f}.webp"

    def put_thumbnail(self, image: GalleryImage, content: bytes) -> None:
        """Store the small copy of an image."""
        path = self.thumbnail(image)
        path.parent.mkdir(exist_ok=True)
        self._remove_thumbnails(image)
        write_atomic(path, [content], error=StorageError, durable=False)

    def _remove_thumbnails(self, image: GalleryImage) -> None:
        for path in (self.thumbnails / image.id[-2:]).glob(f"{image.id}-*"):
            path.unlink(missing_ok=True)

    # the trash

    def trash(self, image: GalleryImage) -> None:
        """Move an image into the trash."""
        if image.state != "present":
            return
        try:
            self._move(image, f"{TRASH}/{image.id}/{image.path}", "trashed")
        except MissingError:  # another program was faster
            self.rows.move(image.id, "missing", image.path, self._clock())

    def restore(self, image: GalleryImage) -> GalleryImage:
        """Move an image back out of the trash, under another name if its own is taken."""
        if image.state != "trashed":
            return image
        path = _origin(image)
        stem, suffix = path.removesuffix(Path(path).suffix), Path(path).suffix
        for number in range(1, 100_000):
            name = path if number == 1 else f"{stem}-{number}{suffix}"
            if not os.path.lexists(self.folder / name) and self.rows.path_is_free(name, image.id):
                break
        self._move(image, name, "present")
        with contextlib.suppress(OSError):
            remove_empty(self.folder / TRASH / image.id)
        return replace(image, path=name, state="present")

    def _move(self, image: GalleryImage, path: str, state: State) -> None:
        """Move the file of an image, then change its row: `_settle` finishes what a kill interrupts."""
        self.ensure_there()
        target = self.folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / image.path).rename(target)
        except FileNotFoundError:
            raise MissingError(f"the file of image {image.id} is not in the gallery any more") from None
        except OSError as error:
            raise StorageError(f"the file of image {image.id} cannot be moved: {error.strerror or error}") from None
        self.rows.move(image.id, state, path, self._clock())

    def purge(self, image: GalleryImage) -> None:
        """Delete an image for good."""
        self.ensure_there()
        try:
            if image.state != "missing":  # another program's file may have its name by now
                (self.folder / image.path).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"the file of image {image.id} cannot be deleted: {error.strerror or error}") from None
        shutil.rmtree(self.folder / TRASH / image.id, ignore_errors=True)
        self._remove_thumbnails(image)
        self.rows.remove(image.id)

    # other programs

    def _settle(self, older_than: float) -> None:
        """Finish what a killed process had begun: images that were being written or moved."""
        now = self._clock()
        for image in self.rows.in_states("writing"):
            if now - image.changed < older_than:
                continue
            if (self.folder / image.path).is_file():
                self._completed(image)
            else:
                self.rows.remove(image.id)
        for image in self.rows.in_states("trashed"):
            if not (self.folder / image.path).exists() and (self.folder / _origin(image)).is_file():
                if self.rows.path_is_free(_origin(image), image.id):
                    self.rows.move(image.id, "present", _origin(image), now)

    def changes(self) -> Changes:
        """Compare the folder with the rows: mark what is missing or has returned, and return what has to be read."""
        self.ensure_there()
        result, rows = Changes(), self.rows.stamps()
        files = {path: (account, (size, modified)) for account, path, size, modified in image_files(self.folder)}
        for path, (image, state, size, modified) in rows.items():
            here = files.pop(path, None)
            if state in ("writing", "trashed"):
                continue
            if here is None:
                if state == "present":
                    trashed = f"{TRASH}/{image}/{path}"
                    moved = (self.folder / trashed).is_file()  # by a process that was killed before it changed the row
                    self.rows.move(image, "trashed" if moved else "missing", trashed if moved else path, self._clock())
                    result.missing += 1
            elif here[1] != (size, modified):
                files[path] = here
            elif state == "missing":
                self.rows.move(image, "present", path, self._clock())
                result.returned += 1
        self._unreadable = {path: stamp for path, stamp in self._unreadable.items() if path in files}
        result.files = [
            (account, path, stamp) for path, (account, stamp) in files.items() if self._unreadable.get(path) != stamp
        ]
        return result

    def skip(self, path: str, stamp: Stamp) -> None:
        """Do not return a file from `changes` again until it changes: it is not an image, or not a whole one."""
        self._unreadable[path] = stamp

    def adopt(self, account: str, path: str, content: bytes, facts: ImageFacts) -> GalleryImage | None:
        """Store the row of a file that another program wrote or moved; None if it changed since it was read."""
        digest, now = hashlib.sha256(content).hexdigest(), self._clock()
        with self._lock:
            try:
                status = (self.folder / path).stat()
            except OSError:
                return None
            if status.st_size != len(content):
                return None
            known = self.rows.at(path)
            if known is None:
                same = [each for each in self.rows.of_content(digest, "missing") if each.account == account]
                known = next(iter(same), None)
            image = known or GalleryImage(
                0, _new_id(), account, path, "present", "", 0, min(status.st_mtime, now), now, now, 0, 0.0, "", False,
                facts,
            )  # fmt: skip
            if known is not None:
                self._remove_thumbnails(known)
            image = replace(
                image, path=path, state="present", bytes=status.st_size, modified=status.st_mtime, sha256=digest,
                changed=now, facts=facts,
            )  # fmt: skip
            if known is None:
                return image if self.rows.insert(image) else None
            self.rows.update(image)
            return image

    # retention

    def beyond_limits(self) -> list[GalleryImage]:
        """Return what was in the trash long enough, and what exceeds the limits, for `purge`."""
        self.ensure_there()
        self._settle(LOST_SECONDS)
        now, gone = self._age_clock(), []
        for image in self.rows.in_states("trashed", "missing"):
            if image.changed < now - (TRASH_SECONDS if image.state == "trashed" else MISSING_SECONDS):
                gone.append(image)
        if self._keep_seconds is None and self._keep_bytes is None:
            return gone
        images, in_albums = self.rows.in_states("present"), self.rows.albums.images()
        total = sum(image.bytes for image in images)
        for image in images:
            if not image.job or image.starred or image.id in in_albums:
                continue
            late = self._keep_seconds is not None and image.added < now - self._keep_seconds
            if late or (self._keep_bytes is not None and total > self._keep_bytes):
                gone.append(image)
                total -= image.bytes
        return gone

    def owned(self, account: str, images: Sequence[str]) -> list[GalleryImage]:
        """Return the images of an account with these ids; others are left out."""
        rows = []
        for image in dict.fromkeys(images):
            with contextlib.suppress(MissingError):
                rows.append(self.rows.image(account, image))
        return rows


def _origin(image: GalleryImage) -> str:
    """Return the path that an image in the trash had before."""
    return image.path.removeprefix(f"{TRASH}/{image.id}/")


def _new_id() -> str:
    return f"image-{secrets.token_hex(12)}"
