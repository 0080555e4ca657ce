"""Datasets that clients upload to train on: pictures and captions, one folder each.

    <data>/datasets/<id>/dataset.json      {"name": ...}
    <data>/datasets/<id>/files/<name>.png, <name>.txt

Pictures are checked and encoded anew before they are stored, so that nothing a stranger sent is ever decoded in the
process that trains. Names are those of the client, reduced to letters, digits, spaces, dots, dashes and underscores.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.files.writing import write_atomic
from inweave.models import embedded
from inweave.serve.errors import StorageError

MAX_FILES = 20_000
MAX_CAPTION = 20_000
_ID = re.compile(r"dataset-[0-9a-f]{16}")
_NAME = re.compile(r"[\w][\w .-]{0,119}")


class DatasetStore:
    """The datasets of a worker, below one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def create(self, name: str) -> dict[str, Any]:
        """A new, empty dataset."""
        dataset = f"dataset-{secrets.token_hex(8)}"
        (self._folder / dataset / "files").mkdir(parents=True)
        facts = {"name": name.strip()[:200] or dataset, "created": time.time()}
        (self._folder / dataset / "dataset.json").write_text(json.dumps(facts), "utf-8")
        return self.describe(dataset)

    def folder(self, dataset: str) -> Path:
        """Where the files of a dataset are; `MissingError` where there is none. Styles of the package have names."""
        if dataset.startswith("inweave/"):
            try:
                return embedded.style_folder(dataset)
            except ConfigError as error:
                raise MissingError(str(error)) from None
        files = self._folder / dataset / "files"
        if not _ID.fullmatch(dataset) or not files.is_dir():
            raise MissingError(f"there is no dataset {dataset[:100]}")
        return files

    def put_picture(self, dataset: str, name: str, png: bytes) -> str:
        """Store a checked picture; returns the name it is stored under."""
        files = self._own(dataset)
        target = files / f"{_stem(name)}.png"
        if not target.exists() and sum(1 for _ in files.iterdir()) >= MAX_FILES:
            raise ConflictError(f"a dataset may hold {MAX_FILES:,} files")
        write_atomic(target, [png], error=StorageError)
        return target.name

    def put_caption(self, dataset: str, name: str, text: str) -> str:
        """Store the caption of a picture."""
        files = self._own(dataset)
        stem = _stem(name)
        if not (files / f"{stem}.png").is_file():
            raise MissingError(f"there is no picture {stem} in this dataset")
        if len(text) > MAX_CAPTION:
            raise ConfigError(f"a caption may hold {MAX_CAPTION:,} characters, this one has {len(text):,}")
        write_atomic(files / f"{stem}.txt", [text.encode("utf-8", "replace")], error=StorageError)
        return f"{stem}.txt"

    def delete_picture(self, dataset: str, name: str) -> None:
        """Remove a picture and its caption."""
        stem = _stem(name)
        picture = self._own(dataset) / f"{stem}.png"
        if not picture.is_file():
            raise MissingError(f"there is no picture {stem} in this dataset")
        picture.unlink()
        picture.with_suffix(".txt").unlink(missing_ok=True)

    def picture(self, dataset: str, name: str) -> Path:
        """The file of a picture."""
        folder = self.folder(dataset)
        for path in sorted(folder.iterdir()):
            if path.name == name and path.suffix == ".png":
                return path
        raise MissingError(f"there is no picture {name[:100]} in this dataset")

    def describe(self, dataset: str) -> dict[str, Any]:
        """Its name, its pictures and their captions."""
        folder = self.folder(dataset)
        facts: dict[str, Any] = {"name": dataset}
        if not dataset.startswith("inweave/"):
            facts = json.loads((folder.parent / "dataset.json").read_text("utf-8"))
        pictures = []
        for path in sorted(folder.glob("*.png")):
            caption = path.with_suffix(".txt")
            text = caption.read_text("utf-8") if caption.is_file() else ""
            pictures.append({"name": path.name, "caption": text, "size": path.stat().st_size})
        return {"id": dataset, **facts, "pictures": pictures, "built_in": dataset.startswith("inweave/")}

    def summaries(self) -> list[dict[str, Any]]:
        """Every dataset, the package's last."""
        own = sorted(path.name for path in self._folder.iterdir() if _ID.fullmatch(path.name))
        rows = [self.describe(dataset) for dataset in (*own, *(f"inweave/{style}" for style in embedded.styles()))]
        return [{**row, "pictures": len(row["pictures"])} for row in rows]

    def delete(self, dataset: str) -> None:
        shutil.rmtree(self._own(dataset).parent)

    def _own(self, dataset: str) -> Path:
        if dataset.startswith("inweave/"):
            raise ConflictError(f"{dataset} comes with the package and cannot be changed")
        return self.folder(dataset)


def _stem(name: str) -> str:
    """The stem a client's file gets; folders in front of it are dropped."""
    last = name.replace("\\", "/").rpartition("/")[2]
    stem = last.rpartition(".")[0] if "." in last.lstrip(".") else last
    if not _NAME.fullmatch(stem) or stem.endswith((" ", ".")):
        raise ConfigError(
            f"{last[:60]!r}: a name of letters, digits, spaces, dots, dashes and underscores is needed, at most 120"
        )
    return stem
