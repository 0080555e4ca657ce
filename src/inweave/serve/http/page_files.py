"""The web page: static files of the package, served from memory.

    GET /                       index.html, with the digest of all files in its addresses; never cached
    GET /page/DIGEST/PATH       one file, cached for good: other contents have another address

Modules import each other by relative paths, so that a page never mixes the files of two versions. The files are
public and need no token; their data comes from the API. Texts are sent compressed to clients that accept gzip.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from inweave.errors import MissingError
from inweave.files.stamps import Stamp, path_stamp

router = APIRouter(include_in_schema=False)
PREFIX = "/page/"
#: the part of addresses in index.html that the digest replaces
_PLACEHOLDER = b"/page/-/"
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".woff2": "font/woff2", ".webmanifest": "application/manifest+json",
}  # fmt: skip
_BINARY = (".png", ".woff2")


@dataclass(frozen=True, slots=True)
class PageFiles:
    """Every file of the page by its path, texts also compressed, and the digest of them all."""

    contents: dict[str, bytes]
    compressed: dict[str, bytes]
    digest: str
    stamp: tuple[tuple[str, Stamp], ...]

    @classmethod
    def read(cls, folder: Path) -> PageFiles:
        stamp = _stamp(folder)
        contents = {path: (folder / path).read_bytes() for path, _ in stamp}
        digest = hashlib.sha256()
        for path, content in contents.items():
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        texts = {path: content for path, content in contents.items() if not path.endswith(_BINARY)}
        compressed = {path: gzip.compress(content, mtime=0) for path, content in texts.items()}
        return cls(contents, compressed, digest.hexdigest()[:16], stamp)

    def index(self) -> bytes:
        return self.contents["index.html"].replace(_PLACEHOLDER, f"{PREFIX}{self.digest}/".encode())


class Page:
    """The files on disk, read again when they change, so that a developer only has to reload the page."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(str(resources.files("inweave.serve").joinpath("page")))
        self._files = PageFiles.read(self.folder)

    @property
    def files(self) -> PageFiles:
        if _stamp(self.folder) != self._files.stamp:
            self._files = PageFiles.read(self.folder)
        return self._files

    def served(self) -> PageFiles:
        """Return the files of the last visit, without another look at the disk."""
        return self._files


def _stamp(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in _TYPES and path.is_file())
    return tuple((path.relative_to(folder).as_posix(), path_stamp(path)) for path in paths)


@router.get("/")
@router.head("/")
async def index(request: Request) -> Response:
    files = _page(request).files
    headers = {"ETag": f'"{files.digest}"', "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(files.index(), media_type=_TYPES[".html"], headers=headers)


@router.get("/page/{digest}/{path:path}")
async def page_file(request: Request, digest: str, path: str) -> Response:
    files = _page(request).served()
    content = files.contents.get(path)
    if content is None or digest != files.digest:
        raise MissingError("the page has no such file, or another version of it; reload the page")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if path in files.compressed and _accepts_gzip(request.headers.get("accept-encoding", "")):
        content = files.compressed[path]
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=_TYPES[Path(path).suffix], headers=headers)


def _accepts_gzip(header: str) -> bool:
    """Return whether an Accept-Encoding header names gzip, with a weight that is not 0."""
    for choice in header.lower().split(","):
        name, _, weight = choice.partition(";")
        if name.strip() == "gzip":
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight)
    return False


def _page(request: Request) -> Page:
    page: Page = request.app.state.page
    return page
