"""Which file a LoRA choice means: a path, a name in the LoRA folders, or a hash.

A name is a file's stem, or else the name its trainer recorded (`ss_output_name`); two files that answer to one name are
an error that lists them. Hashes are SHA-256, AutoV2 (10 digits) or AutoV3 (12 digits), read once a file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.exchange.hashes import Hashes, hash_file
from inweave.formats.files import read_header
from inweave.generate.config import GenerateConfig, LoraChoice, read_loras
from inweave.generate.prompt import parse
from inweave.models import embedded


class LoraFinder:
    """Looks adapters up in ``folders``, then among those the package brings."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.folders: Sequence[Path] = [Path(folder).expanduser() for folder in folders]

    def files(self) -> list[Path]:
        found = [path for folder in self.folders for path in sorted(folder.rglob("*.safetensors"))]
        return [*found, *embedded.loras().values()]

    def find(self, choice: LoraChoice) -> Path:
        """The file, or a `ConfigError` that says what there is."""
        if choice.path is not None:
            place = Path(choice.path).expanduser()
            if not place.exists():
                raise ConfigError(f"LoRA {choice.path}: no such file")
            return place
        if choice.hash is not None:
            return self._by_hash(choice.hash)
        assert choice.name is not None
        if Path(choice.name).is_file():
            return Path(choice.name)
        return self._by_name(choice.name)

    def _by_name(self, name: str) -> Path:
        files = self.files()
        found = [path for path in files if path.stem == name or path.name == name]
        if not found:
            found = [path for path in files if _alias(path, _stamp(path)) == name]
        distinct = {path.resolve(): path for path in found}
        if len(distinct) > 1:
            own = [path for path in distinct.values() if path not in embedded.loras().values()]
            if len(own) == 1:
                return own[0]  # a user's file goes before the package's
            raise ConfigError(
                f"LoRA {name}: several files have this name: {', '.join(str(p) for p in distinct.values())}"
            )
        if not distinct:
            names = sorted({path.stem for path in files})
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names[:20]) or 'none'}"
            where = ", ".join(str(folder) for folder in self.folders) or "no LoRA folder was given"
            raise ConfigError(f"LoRA {name}: not found ({where}); {hint}")
        return next(iter(distinct.values()))

    def _by_hash(self, said: str) -> Path:
        wanted = said.lower().removeprefix("0x")
        if len(wanted) not in (10, 12, 64) or any(digit not in "0123456789abcdef" for digit in wanted):
            raise ConfigError(f"LoRA hash {said!r}: expected 10 (AutoV2), 12 (AutoV3) or 64 (SHA-256) hex digits")
        for path in self.files():
            hashes = hashes_of(path)
            if wanted in (hashes.sha256, hashes.autov2, hashes.autov3):
                return path
        raise ConfigError(f"LoRA hash {said}: none of {len(self.files())} files has it")


def hashes_of(path: Path) -> Hashes:
    """The hashes of a file, computed once while it stays the same."""
    return _hashes(path, _stamp(path))


@lru_cache(maxsize=4096)
def _hashes(path: Path, stamp: tuple[int, int]) -> Hashes:
    return hash_file(path)


@lru_cache(maxsize=4096)
def _alias(path: Path, stamp: tuple[int, int]) -> str | None:
    try:
        return read_header(path).metadata.get("ss_output_name")
    except FormatError:
        return None  # a broken file has no name; naming it by its stem reports what is wrong with it


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def checked_request(settings: Mapping[str, Any], finder: LoraFinder) -> GenerateConfig:
    """A configuration whose LoRAs exist; what is wrong with its fields and with its files comes back in one error."""
    wrong: list[str] = []
    config: GenerateConfig | None = None
    choices: Sequence[LoraChoice] = ()
    try:
        config = GenerateConfig.of(**settings)
        choices = config.loras
    except ConfigError as error:
        wrong += error.problems
        with suppress(ConfigError, TypeError):  # already told of
            choices = read_loras(settings.get("loras") or ())
    texts = [str(settings.get(name) or "") for name in ("prompt", "negative_prompt")]
    for tag in (tag for text in texts for tag in parse(text).tags):
        with suppress(ConfigError):
            choices = (*choices, LoraChoice.tagged(tag))
    for choice in choices:
        try:
            finder.find(choice)
        except ConfigError as error:
            wrong += error.problems
    if wrong or config is None:
        raise ConfigError(list(dict.fromkeys(wrong)))
    return config
