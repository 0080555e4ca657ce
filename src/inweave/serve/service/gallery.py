"""The gallery: images of finished jobs that stay, and images that were imported or put into its folder.

Every call concerns the images of the caller's account alone; callers without an account share one set.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError, MissingError
from inweave.generate.prompt import parse
from inweave.serve.jobs.accounts import CURRENT
from inweave.serve.jobs.errors import StoreLost
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.store import JobStore
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.storage.gallery import TRASH_SECONDS, GalleryStore
from inweave.serve.storage.gallery_rows import GalleryImage, GalleryQuery, ImageFacts

__all__ = ["MAX_IMAGES", "Gallery", "GalleryQuery"]

log = logging.getLogger("inweave.serve")
#: images in one call
MAX_IMAGES = 1000
#: for a file on its way into the trash or out of it
MOVE_SECONDS = 0.1
#: pixels of the longer side of a small copy
THUMBNAIL = 384
_MAX_TEXT = 20_000


class Gallery:
    """The images that stay: list, search, star, sort into albums, delete and restore, import."""

    def __init__(self, store: GalleryStore | None, sandbox: SandboxClient, jobs: JobStore) -> None:
        self._opened, self._sandbox, self._jobs = store, sandbox, jobs
        self._scan = asyncio.Lock()

    @property
    def enabled(self) -> bool:
        """Whether this worker has a gallery."""
        return self._opened is not None

    @property
    def _store(self) -> GalleryStore:
        if self._opened is None:
            raise MissingError("this worker has no gallery: it was started with --no-gallery")
        return self._opened

    def close(self) -> None:
        """Close the database."""
        if self._opened is not None:
            self._opened.close()

    # reading

    async def images(self, query: GalleryQuery) -> dict[str, Any]:
        """Return the images that a query asks for, where the list continues, and without a cursor their number."""
        rows, account = self._store.rows, _account()
        if query.album:
            await asyncio.to_thread(rows.albums.ensure, account, query.album)
        images = await asyncio.to_thread(rows.images, account, query)
        total = None if query.cursor else await asyncio.to_thread(rows.count, account, query)
        following = images[-1].cursor if len(images) == query.limit else None
        return {"images": [image.as_dict() for image in images], "next": following, "total": total}

    async def image(self, image: str) -> dict[str, Any]:
        """Return one image; raise MissingError if there is none."""
        return (await self._find(image)).as_dict()

    async def _find(self, image: str) -> GalleryImage:
        return await asyncio.to_thread(self._store.rows.image, _account(), image)

    async def _content(self, image: str) -> tuple[GalleryImage, bytes]:
        """Return an image and the bytes of its file, which another call may be moving."""
        row = await self._find(image)
        try:
            return row, await asyncio.to_thread(self._store.read, row.path)
        except MissingError:
            await asyncio.sleep(MOVE_SECONDS)
            row = await self._find(image)
            return row, await asyncio.to_thread(self._store.read, row.path)

    async def file(self, image: str) -> tuple[Path, str, str]:
        """Return (the folder of the gallery, the path of an image in it, its media type)."""
        row = await self._find(image)
        if not await asyncio.to_thread((self._store.folder / row.path).is_file):  # another call may be moving it
            await asyncio.sleep(MOVE_SECONDS)
            row = await self._find(image)
        return self._store.folder, row.path, f"image/{row.facts.format.lower()}"

    async def thumbnail(self, image: str) -> Path | None:
        """Return the path of a small copy of an image, a WebP; None if the image itself is small."""
        row = await self._find(image)
        if max(row.facts.width, row.facts.height) <= THUMBNAIL:
            return None
        path = self._store.thumbnail(row)
        if not path.is_file():
            row, content = await self._content(image)
            small = await self._sandbox.thumbnail_of(content, THUMBNAIL, f"image {row.id}")
            await asyncio.to_thread(self._store.put_thumbnail, row, small)
        return path

    async def settings(self, image: str) -> dict[str, Any]:
        """Return the settings that an image was made with; raise RequestError if it does not hold them."""
        _, content = await self._content(image)
        return await self._sandbox.settings(content)

    async def facets(self) -> dict[str, Any]:
        """Return what the images can be filtered by, with numbers, and how long deleted ones can be restored."""
        facets = await asyncio.to_thread(self._store.rows.facets, _account())
        return {**facets, "trash_days": TRASH_SECONDS / 86400}

    # changes

    async def star(self, images: Sequence[str], starred: bool) -> int:
        """Star images, or remove their stars; return how many there are."""
        return await asyncio.to_thread(self._store.rows.star, _account(), images, starred)

    async def delete(self, images: Sequence[str]) -> list[str]:
        """Move images into the trash; return the ids of those that are there now."""
        return await asyncio.to_thread(self._delete, images)

    def _delete(self, images: Sequence[str]) -> list[str]:
        rows = self._store.owned(_account(), images)
        for row in rows:
            self._store.trash(row)
        return [row.id for row in rows]

    async def restore(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """Move images back out of the trash and return them."""

        def restore() -> list[dict[str, Any]]:
            return [self._store.restore(row).as_dict() for row in self._store.owned(_account(), images)]

        return await asyncio.to_thread(restore)

    async def purge(self, images: Sequence[str] | None) -> int:
        """Delete images of the trash for good, all of them without a list; return how many there were."""
        return await asyncio.to_thread(self._purge, images)

    def _purge(self, images: Sequence[str] | None) -> int:
        account, number = _account(), 0
        if images is None:
            rows = [row for row in self._store.rows.in_states("trashed") if row.account == account]
        else:
            rows = [row for row in self._store.owned(account, images) if row.state == "trashed"]
        for row in rows:
            self._remove(row)
            number += 1
        return number

    def _remove(self, row: GalleryImage) -> None:
        """Delete an image and the copy that its job still has."""
        self._store.purge(row)
        if row.job:
            with suppress(InweaveError):  # the job expired, or its image was deleted
                job = self._jobs.job(row.job)
                for image in (job.result or {}).get("images", ()):
                    if image.get("gallery") == row.id:
                        self._jobs.delete_image(job.id, image["file"])

    async def of_job(self, job: Job, name: str) -> str | None:
        """Return the id of the caller's copy of a job's image, by the name of its file; None without one."""
        ids = [image.get("gallery") for image in (job.result or {}).get("images", ()) if image["file"] == name]
        if self._opened is None or not ids or ids[0] is None:
            return None
        rows = await asyncio.to_thread(self._store.owned, _account(), [ids[0]])
        return rows[0].id if rows else None

    # albums

    async def albums(self) -> list[dict[str, Any]]:
        """Return the caller's albums."""
        albums = await asyncio.to_thread(self._store.rows.albums.list, _account())
        return [
            {**album, "cover": f"/v1/gallery/{album['cover']}/thumbnail" if album["cover"] else None}
            for album in albums
        ]

    async def create_album(self, name: str) -> str:
        """Return the id of a new album."""
        return await asyncio.to_thread(self._store.rows.albums.create, _account(), name)

    async def rename_album(self, album: str, name: str) -> None:
        """Change the name of an album."""
        await asyncio.to_thread(self._store.rows.albums.rename, _account(), album, name)

    async def delete_album(self, album: str) -> None:
        """Forget an album; its images stay."""
        await asyncio.to_thread(self._store.rows.albums.remove, _account(), album)

    async def put_into_album(self, album: str, images: Sequence[str], present: bool) -> int:
        """Put images into an album, or take them out; return how many there are."""
        return await asyncio.to_thread(self._store.rows.albums.put, _account(), album, images, present)

    # files from elsewhere

    async def import_image(self, name: str, content: bytes, created: float | None) -> tuple[dict[str, Any], bool]:
        """Store an image file as it came; return it, and whether it is new. Raise RequestError if it is not one."""
        facts = _facts_of(await self._sandbox.image_facts(content, f"image {name[-100:]}"))
        row, new = await asyncio.to_thread(self._store.import_image, _account(), name, content, facts, created)
        return row.as_dict(), new

    async def refresh(self) -> dict[str, int]:
        """Compare the folder with what is known of it; return the numbers of files by what happened to them."""
        store = self._store
        async with self._scan:
            changes = await asyncio.to_thread(store.changes)
            read = skipped = 0
            for account, path, stamp in changes.files:
                try:
                    content = await asyncio.to_thread(store.read, path)
                    facts = _facts_of(await self._sandbox.image_facts(content, path[-100:]))
                except InweaveError as error:
                    log.info("%s is not shown in the gallery: %s", path, error)
                    row = None
                else:
                    row = await asyncio.to_thread(store.adopt, account, path, content, facts)
                if row is None:
                    store.skip(path, stamp)
                read, skipped = read + (row is not None), skipped + (row is None)
        return {"read": read, "missing": changes.missing, "returned": changes.returned, "skipped": skipped}

    def expire(self) -> None:
        """Delete what the trash and the limits no longer keep."""
        if self._opened is not None:
            for row in self._opened.beyond_limits():
                self._remove(row)

    # for the dispatchers

    def deliver(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Put the images of a finished job into the gallery, and their ids into its result.

        A gallery that refuses does not fail the job, whose images are kept for a while: the result has a warning.
        """
        if self._opened is None or not job.request.get("gallery", True):
            return result
        images, warnings = [], [*result.get("warnings", ())]
        names = [str(lora.get("name")) for lora in result.get("loras", ())]
        now = time.time()
        for place, image in enumerate(result.get("images", ())):
            settings = {**image.get("settings", {}), "model": job.model}
            facts = ImageFacts("PNG", image["width"], image["height"], **_texts(settings, job.model, names))
            try:
                content = self._jobs.files.read(job.id, image["file"])
                made = now - place * 1e-4  # newest first, a list has the images of a job in their order
                row = self._opened.add(job.id, job.account, place, content, facts, settings, made)
                images.append({**image, "gallery": row.id})
            except StoreLost:
                raise
            except (InweaveError, OSError, sqlite3.Error, KeyError) as error:
                log.error("an image of %s is not in the gallery: %s", job.id, error)
                warnings.append(f"image {place} could not be put into the gallery; it expires with its job")
                images.append(image)
        return {**result, "images": images, "warnings": warnings}


def _account() -> str:
    account = CURRENT.get()
    return "" if account is None else account.name


def _facts_of(read: Mapping[str, Any]) -> ImageFacts:
    """Return the facts of an image that the sandbox has read."""
    source = read["settings"] or {}
    config, model = source.get("config") or {}, source.get("model") or {}
    choices = config.get("loras") or ()
    labels = [each.get("name") or each.get("hash") if isinstance(each, Mapping) else each for each in choices]
    names = [str(label) for label in labels if label]
    texts = _texts(config, str(model.get("name") or ""), names)
    return ImageFacts(read["format"], read["width"], read["height"], **texts)


def _texts(config: Mapping[str, Any], model: str, loras: Sequence[str]) -> dict[str, Any]:
    """Return the texts of a row; an image from elsewhere may have anything in its settings."""
    prompt = str(config.get("prompt") or "")
    names = dict.fromkeys((*loras, *(tag.name for tag in parse(prompt).tags)))
    seed = config.get("seed")
    return {
        "prompt": _plain(prompt), "negative": _plain(str(config.get("negative_prompt") or "")),
        "model": _plain(model)[:200], "seed": "" if seed is None else _plain(str(seed))[:40],
        "loras": tuple(_plain(name)[:200] for name in names)[:100],
    }  # fmt: skip


def _plain(text: str) -> str:
    """Return a text that every database and answer can hold."""
    return text[:_MAX_TEXT].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
