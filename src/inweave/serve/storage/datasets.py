"""Datasets that clients upload for training: images and captions, one folder each.

    <data>/datasets/<id>/dataset.json      {"name": ...}
    <data>/datasets/<id>/files/<name>.png, <name>.txt
    <data>/datasets/<id>/thumbnails/<name>.webp     created by the first request for them

Images are decoded and encoded again in the sandbox before they are stored, so that the training process never decodes
an untrusted file. Names are those of the client, limited to letters, digits, spaces, dots, dashes and underscores.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.files.writing import write_atomic
from inweave.models import embedded
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.image_request import png_size

MAX_DATASETS = 200
MAX_IMAGES = 10_000
MAX_CAPTION = 20_000
THUMBNAIL = 320  # pixels of the longer side
_ID = re.compile(r"dataset-[0-9a-f]{16}")
_NAME = re.compile(r"[\w][\w .-]{0,119}")


class DatasetStore:
    """The datasets of a worker, below one folder; ``max_bytes`` limits their total size."""

    def __init__(self, folder: Path, max_bytes: int = 2**63) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._bytes: int | None = None  # of all images; counted when it is first needed

    def create(self, name: str) -> dict[str, Any]:
        """Create an empty dataset."""
        if len(self._own_names()) >= MAX_DATASETS:
            raise ConflictError(f"there are {MAX_DATASETS} datasets, the most that are allowed; delete some first")
        dataset = f"dataset-{secrets.token_hex(8)}"
        (self._folder / dataset / "files").mkdir(parents=True)
        self._write_facts(dataset, {"name": name.strip()[:200] or dataset, "created": time.time()})
        return self.describe(dataset)

    def rename(self, dataset: str, name: str) -> dict[str, Any]:
        """Change the display name of a dataset."""
        facts = self._facts(self._own(dataset), dataset)
        self._write_facts(dataset, {**facts, "name": name.strip()[:200] or dataset})
        return self.describe(dataset)

    def folder(self, dataset: str) -> Path:
        """Return the folder of a dataset, by its id or the name of a bundled style; raise MissingError if unknown."""
        if dataset.startswith("inweave/"):
            try:
                return embedded.style_folder(dataset)
            except ConfigError as error:
                raise MissingError(str(error)) from None
        files = self._folder / dataset / "files"
        if not _ID.fullmatch(dataset) or not files.is_dir():
            raise MissingError(f"there is no dataset {dataset[:100]}")
        return files

    def put_image(self, dataset: str, name: str, png: bytes) -> str:
        """Store an image from the sandbox; return the name it is stored under."""
        files = self._own(dataset)
        target = files / f"{_stem(name)}.png"
        with self._lock:
            before = target.stat().st_size if target.exists() else 0
            if not before and sum(1 for _ in files.glob("*.png")) >= MAX_IMAGES:
                raise ConflictError(f"a dataset may hold {MAX_IMAGES:,} images")
            if self._used() + len(png) - before > self._max_bytes:
                limit = self._max_bytes / 2**30
                raise ConflictError(f"the datasets of this worker may hold {limit:g} GB together; delete some first")
            write_atomic(target, [png], error=StorageError)
            self._bytes = self._used() + len(png) - before
        self._thumbnail(dataset, target.name).unlink(missing_ok=True)
        return target.name

    def put_caption(self, dataset: str, name: str, text: str) -> str:
        """Store the caption of an image."""
        self.put_captions(dataset, {name: text})
        return f"{_stem(name)}.txt"

    def put_captions(self, dataset: str, captions: Mapping[str, str]) -> dict[str, str]:
        """Store several captions, or none if one of them is invalid; return the previous ones by image."""
        files = self._own(dataset)
        targets: dict[Path, str] = {}
        for name, text in captions.items():
            stem = _stem(name)
            if not (files / f"{stem}.png").is_file():
                raise MissingError(f"there is no image {stem} in this dataset")
            if len(text) > MAX_CAPTION:
                raise ConfigError(
                    f"a caption may hold {MAX_CAPTION:,} characters; the caption of {stem} has {len(text):,}"
                )
            targets[files / f"{stem}.txt"] = text
        before = {path.with_suffix(".png").name: _caption(path) for path in targets}
        for path, text in targets.items():
            write_atomic(path, [text.encode("utf-8", "replace")], error=StorageError)
        return before

    def delete_image(self, dataset: str, name: str) -> None:
        """Remove an image and its caption."""
        stem = _stem(name)
        image = self._own(dataset) / f"{stem}.png"
        if not image.is_file():
            raise MissingError(f"there is no image {stem} in this dataset")
        with self._lock:
            self._bytes = self._used() - image.stat().st_size
            image.unlink()
        image.with_suffix(".txt").unlink(missing_ok=True)
        self._thumbnail(dataset, image.name).unlink(missing_ok=True)

    def image(self, dataset: str, name: str) -> Path:
        """Return the path of an image."""
        path = self.folder(dataset) / name
        if "/" in name or not name.endswith(".png") or not path.is_file():
            raise MissingError(f"there is no image {name[:100]} in this dataset")
        return path

    def thumbnail(self, dataset: str, name: str) -> tuple[Path, Path | None]:
        """Return (the image, the path of its thumbnail; None if the image itself is small enough)."""
        image = self.image(dataset, name)
        small = max(_size(image)) <= THUMBNAIL or dataset.startswith("inweave/")
        return image, None if small else self._thumbnail(dataset, name)

    def describe(self, dataset: str) -> dict[str, Any]:
        """Return the name of a dataset, its images and their captions."""
        folder = self.folder(dataset)
        images = []
        for path in sorted(folder.glob("*.png")):
            (width, height), stat = _size(path), path.stat()
            images.append({
                "name": path.name, "caption": _caption(path.with_suffix(".txt")), "size": stat.st_size, "width": width,
                "height": height, "modified": stat.st_mtime,
            })  # fmt: skip
        return {"id": dataset, **self._facts(folder, dataset), "pictures": images, "built_in": _built_in(dataset)}

    def summaries(self) -> list[dict[str, Any]]:
        """Return a summary of every dataset; the bundled ones come last."""
        names = (*self._own_names(), *(f"inweave/{style}" for style in embedded.styles()))
        rows = []
        for dataset in names:
            folder = self.folder(dataset)
            paths = sorted(path.name for path in folder.glob("*.png"))
            rows.append({
                "id": dataset, **self._facts(folder, dataset), "pictures": len(paths),
                "first": paths[0] if paths else None, "built_in": _built_in(dataset),
            })  # fmt: skip
        return rows

    def delete(self, dataset: str) -> None:
        """Remove a dataset."""
        files = self._own(dataset)
        with self._lock:
            shutil.rmtree(files.parent)
            self._bytes = None

    def _own(self, dataset: str) -> Path:
        if _built_in(dataset):
            raise ConflictError(f"{dataset} comes with the package and cannot be changed")
        return self.folder(dataset)

    def _own_names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name))

    def _facts(self, files: Path, dataset: str) -> dict[str, Any]:
        if _built_in(dataset):
            return {"name": dataset}
        facts: dict[str, Any] = json.loads((files.parent / "dataset.json").read_text("utf-8"))
        return facts

    def _write_facts(self, dataset: str, facts: Mapping[str, Any]) -> None:
        content = json.dumps(facts).encode()
        write_atomic(self._folder / dataset / "dataset.json", [content], error=StorageError)

    def _thumbnail(self, dataset: str, name: str) -> Path:
        return self._folder / dataset / "thumbnails" / f"{name.removesuffix('.png')}.webp"

    def recount(self) -> None:
        """Count the bytes of all images anew when they are next needed: other workers may have changed datasets."""
        with self._lock:
            self._bytes = None

    def _used(self) -> int:
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for path in self._folder.glob("*/files/*.png"))
        return self._bytes


def _built_in(dataset: str) -> bool:
    return dataset.startswith("inweave/")


def _caption(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _size(png: Path) -> tuple[int, int]:
    with png.open("rb") as file:
        return png_size(file.read(24))


def _stem(name: str) -> str:
    """Return the stem for a client's file name, without its folders; raise ConfigError if it is not allowed."""
    last = name.replace("\\", "/").rpartition("/")[2]
    stem = last.rpartition(".")[0] if "." in last.lstrip(".") else last
    if not _NAME.fullmatch(stem) or stem.endswith((" ", ".")):
        raise ConfigError(
            f"{last[:60]!r}: a name of letters, digits, spaces, dots, dashes and underscores is needed, at most 120"
        )
    return stem
