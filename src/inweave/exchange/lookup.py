"""Adapter files by name or hash: in the LoRA folders, then among those that come with the package.

    name    a file's stem, its path inside a LoRA folder (`styles/pixel`), or the name its trainer recorded
            (`ss_output_name`). It never leaves the LoRA folders; two files with the same name are an error that lists
            both
    hash    SHA-256 or BLAKE3 (64 digits), AutoV3 (12), AutoV2 (10) or AutoV1 (8), computed once per file

Files in a LoRA folder that cannot be read are skipped.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from pathlib import Path, PurePosixPath

from inweave.errors import ConfigError, FormatError
from inweave.exchange.hashes import Hashes, hash_digits, hash_file
from inweave.files.paths import expand_home, is_file, is_folder, occupied, printable_path
from inweave.files.stamps import Stamp, path_stamp
from inweave.formats.files import read_header

_EMPTY = "e3b0c442"  # AutoV1 of every file that ends before the bytes it hashes


def packaged_model() -> Path:
    """Return the folder of the bundled model."""
    return Path(str(resources.files("inweave.models").joinpath("emoji")))


def packaged_loras() -> list[Path]:
    """Return the bundled style LoRAs."""
    return sorted((packaged_model() / "loras").glob("*.safetensors"))


class AdapterLookup:
    """Finds adapters in ``folders``, then among the bundled ones."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.folders: Sequence[Path] = [expand_home(folder) for folder in folders]

    def files(self) -> list[Path]:
        """Return all adapter files; the bundled ones come last."""
        folders = [folder for folder in self.folders if is_folder(folder)]
        own = [path for folder in folders for path in sorted(folder.rglob("*.safetensors")) if is_file(path)]
        return [*own, *packaged_loras()]

    def locate(self, text: str | os.PathLike[str]) -> Path:
        """Return the file of an argument: an existing path, or else a name or a hash."""
        path = expand_home(text)
        name = os.fspath(text)
        if occupied(path):
            return path
        if (match := self.match_name(name)) is not None:
            return match
        if "/" in name or "\\" in name or name.endswith((".safetensors", ".json", ".bin", ".pt", ".ckpt")):
            return path  # opening it reports that it does not exist
        hint = self._hint(name, self.files())
        raise FormatError(f"{printable_path(name)}: no such file or directory, and no LoRA has this name; {hint}")

    def by_name(self, name: str) -> Path:
        """Return the file of a name or a hash; raise ConfigError with the available names if there is none."""
        if (match := self.match_name(name)) is not None:
            return match
        ensure_strength(name)
        where = ", ".join(str(folder) for folder in self.folders) or "no LoRA folder was given"
        raise ConfigError(f"LoRA {printable_path(name)}: not found ({where}); {self._hint(name, self.files())}")

    def match_name(self, name: str) -> Path | None:
        """Return the file of a name or a hash, or None; raise ConfigError if several files have the name."""
        files = self.files()
        inside = PurePosixPath(name.replace("\\", "/").removesuffix(".safetensors"))
        matches = [path for path in files if path.stem == name or path.name == name or self._is_at(path, inside)]
        if not matches:
            matches = [path for path in files if _trainer_name(path, path_stamp(path)) == name]
        distinct = {path.resolve(): path for path in matches}
        if len(distinct) > 1:
            own = [path for path in distinct.values() if path not in packaged_loras()]
            if len(own) == 1:
                return own[0]  # a user's file overrides the package's
            raise ConfigError(
                f"LoRA {name}: several files have this name: {', '.join(str(p) for p in distinct.values())}"
            )
        return next(iter(distinct.values()), None) or self.with_hash(name)

    def _is_at(self, path: Path, inside: PurePosixPath) -> bool:
        """Return whether a file has this path relative to one of the folders."""
        return any(
            path.is_relative_to(folder) and path.relative_to(folder).with_suffix("").as_posix() == str(inside)
            for folder in self.folders
        )

    def _hint(self, name: str, files: Sequence[Path]) -> str:
        if "/" in name or "\\" in name:
            return "names are looked up inside the LoRA folders; pass a path with --lora"
        names = sorted({path.stem for path in files})
        near = difflib.get_close_matches(name[:100], names, 1)
        return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names[:20]) or 'none'}"

    def by_hash(self, text: str) -> Path:
        """Return the file with a hash; raise ConfigError if there is none."""
        if not is_hash(text):
            raise ConfigError(
                f"LoRA hash {text[:80]!r}: expected 8 (AutoV1), 10 (AutoV2), 12 (AutoV3) or 64 (SHA-256) hex digits"
            )
        path = self.with_hash(text)
        if path is None:
            raise ConfigError(f"LoRA hash {text}: none of {len(self.files())} files has it")
        return path

    def with_hash(self, text: str) -> Path | None:
        """Return the first file with a hash, or None; files that cannot be read are skipped."""
        for path in self.files() if is_hash(text) else ():
            with suppress(FormatError, OSError):
                if has_hash(hashes_of(path), text):
                    return path
        return None


def is_hash(text: str) -> bool:
    """Return whether a text is a hash of one of the kinds in use."""
    return hash_digits(text) is not None


def has_hash(hashes: Hashes, text: str) -> bool:
    """Return whether a file's hashes include this one."""
    known = {hashes.sha256, hashes.blake3, hashes.autov3, hashes.autov2, hashes.autov1} - {None, _EMPTY}
    return hash_digits(text) in known


def hashes_of(path: Path) -> Hashes:
    """Return the hashes of a file, cached as long as its stamp stays the same."""
    return _hashes(path, path_stamp(path))


@lru_cache(maxsize=4096)
def _hashes(path: Path, stamp: Stamp) -> Hashes:
    return hash_file(path)


@lru_cache(maxsize=4096)
def _trainer_name(path: Path, stamp: Stamp) -> str | None:
    try:
        return read_header(path).metadata.get("ss_output_name")
    except FormatError:
        return None  # opening a broken file by its stem reports what is wrong with it


def ensure_strength(name: str) -> None:
    """Raise ConfigError if a name ends in an invalid strength: `pixel:abc`."""
    head, colon, last = name.rpartition(":")
    if colon and len(head) > 1 and "/" not in last and "\\" not in last:  # not a drive letter
        raise ConfigError(
            f"{printable_path(name)}: {last[:80]!r} is not a strength; write a number, or unet=0.8,te=0.2"
        )


def names_beside(path: Path) -> list[str]:
    """Return the names of the adapter files in the folder of a path."""
    with suppress(OSError):
        return [each.name for each in path.parent.iterdir() if each.suffix == ".safetensors"][:2000]
    return []
