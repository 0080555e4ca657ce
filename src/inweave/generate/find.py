"""Which file a LoRA choice means: a path, a name in the LoRA folders, or a hash.

    path    of an option or an argument: any file
    name    of a prompt, a picture or an option: a file's stem, its path inside a LoRA folder (`styles/pixel`), or the name
            its trainer recorded (`ss_output_name`). It never leaves the LoRA folders; two files with the same name are an
            error that lists them
    hash    SHA-256 or BLAKE3 (64 digits), AutoV3 (12), AutoV2 (10) or AutoV1 (8), computed once per file

A picture tells the hashes of the LoRAs that made it: `hashes` maps names to them, and a name in it is looked up by its hash
first. Files in a LoRA folder that cannot be read are skipped.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from inweave.adapter import Adapter
from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.exchange.hashes import Hashes, hash_file
from inweave.exchange.load import load
from inweave.files.paths import expand_home, is_file, is_folder, printable_path
from inweave.formats.alphas import Alphas, lacks_alpha
from inweave.formats.files import read_header
from inweave.generate.config import GenerateConfig, LoraChoice, parse_loras
from inweave.generate.prompt import parse
from inweave.models import embedded

_LENGTHS = (8, 10, 12, 64)
_EMPTY = "e3b0c442"  # AutoV1 of every file that ends before the bytes it hashes


class LoraFinder:
    """Looks adapters up in ``folders``, then among those that come with the package."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = (), hashes: Mapping[str, str] | None = None) -> None:
        self.folders: Sequence[Path] = [expand_home(folder) for folder in folders]
        self.hashes: Mapping[str, str] = hashes or {}

    def files(self) -> list[Path]:
        """All adapters there are, the package's last."""
        folders = [folder for folder in self.folders if is_folder(folder)]
        own = [path for folder in folders for path in sorted(folder.rglob("*.safetensors")) if is_file(path)]
        return [*own, *embedded.loras().values()]

    def find(self, choice: LoraChoice) -> Path:
        """The file, or a `ConfigError` that lists what there is."""
        if choice.path is not None:
            path = expand_home(choice.path)
            if not is_file(path) and not is_folder(path):
                raise ConfigError(f"LoRA {printable_path(choice.path)}: no such file")
            return path
        if choice.hash is not None:
            return self.by_hash(choice.hash)
        assert choice.name is not None
        digits = self.hashes.get(choice.name)
        if digits is not None and (match := self.with_hash(digits)) is not None:
            return match
        return self._by_name(choice.name)

    def problems(self, choices: Iterable[LoraChoice]) -> list[str]:
        """What cannot be found, and why."""
        wrong: list[str] = []
        for choice in choices:
            try:
                self.find(choice)
            except ConfigError as error:
                wrong += error.problems
        return wrong

    def _by_name(self, name: str) -> Path:
        files = self.files()
        inside = PurePosixPath(name.replace("\\", "/").removesuffix(".safetensors"))
        matches = [path for path in files if path.stem == name or path.name == name or self._is_at(path, inside)]
        if not matches:
            matches = [path for path in files if _trainer_name(path, _stamp(path)) == name]
        distinct = {path.resolve(): path for path in matches}
        if len(distinct) > 1:
            own = [path for path in distinct.values() if path not in embedded.loras().values()]
            if len(own) == 1:
                return own[0]  # a user's file overrides the package's
            raise ConfigError(
                f"LoRA {name}: several files have this name: {', '.join(str(p) for p in distinct.values())}"
            )
        if not distinct:
            where = ", ".join(str(folder) for folder in self.folders) or "no LoRA folder was given"
            raise ConfigError(f"LoRA {printable_path(name)}: not found ({where}); {self._hint(name, files)}")
        return next(iter(distinct.values()))

    def _is_at(self, path: Path, inside: PurePosixPath) -> bool:
        """Whether a file lies there, seen from one of the folders."""
        return any(
            path.is_relative_to(folder) and path.relative_to(folder).with_suffix("").as_posix() == str(inside)
            for folder in self.folders
        )

    def _hint(self, name: str, files: Sequence[Path]) -> str:
        if "/" in name or "\\" in name:
            return "a name is looked up inside of the LoRA folders, and a path goes to --lora"
        names = sorted({path.stem for path in files})
        near = difflib.get_close_matches(name[:100], names, 1)
        return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names[:20]) or 'none'}"

    def by_hash(self, text: str) -> Path:
        """The file with a hash."""
        if not is_hash(text):
            raise ConfigError(
                f"LoRA hash {for_message(text)}: expected 8 (AutoV1), 10 (AutoV2), 12 (AutoV3) or 64 (SHA-256) hex digits"
            )
        path = self.with_hash(text)
        if path is None:
            raise ConfigError(f"LoRA hash {text}: none of {len(self.files())} files has it")
        return path

    def with_hash(self, text: str) -> Path | None:
        """The first file with a hash, if there is one; files that cannot be read have none."""
        for path in self.files() if is_hash(text) else ():
            with suppress(FormatError, OSError):
                if has_hash(hashes_of(path), text):
                    return path
        return None


def is_hash(text: str) -> bool:
    """Whether it is one of the kinds of hashes in use."""
    digits = text.lower().removeprefix("0x")
    return len(digits) in _LENGTHS and re.fullmatch("[0-9a-f]+", digits) is not None


def has_hash(hashes: Hashes, text: str) -> bool:
    """Whether a file's hashes include this one."""
    digits = text.lower().removeprefix("0x")
    known = {hashes.sha256, hashes.blake3, hashes.autov3, hashes.autov2, hashes.autov1} - {None, _EMPTY}
    return digits in known


def hashes_of(path: Path) -> Hashes:
    """The hashes of a file, computed once while it stays the same."""
    return _hashes(path, _stamp(path))


@lru_cache(maxsize=4096)
def _hashes(path: Path, stamp: tuple[int, int]) -> Hashes:
    return hash_file(path)


@lru_cache(maxsize=4096)
def _trainer_name(path: Path, stamp: tuple[int, int]) -> str | None:
    try:
        return read_header(path).metadata.get("ss_output_name")
    except FormatError:
        return None  # a broken file has no name; naming it by its stem reports what is wrong with it


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)  # it is gone; whoever opens it says so
    return status.st_size, status.st_mtime_ns


def adapter_of(choice: LoraChoice, path: Path) -> Path | Adapter:
    """What to weave for a choice whose file is ``path``: the file, or the adapter read with the choice's own alpha."""
    if choice.alpha is None:
        return path
    return _scaled_adapter(path, _stamp(path), json.dumps(choice.alpha, sort_keys=True))


@lru_cache(maxsize=64)
def _scaled_adapter(path: Path, stamp: tuple[int, int], alpha: str) -> Adapter:
    return load(path, alpha=json.loads(alpha))


def with_alpha(choices: Iterable[LoraChoice], finder: LoraFinder, alpha: Alphas | None) -> list[LoraChoice]:
    """The choices with ``alpha`` for each file that does not state its own, of which there must be one."""
    choices = list(choices)
    if alpha is None:
        return choices
    lacking = [any(lacks_alpha(entry) for entry in load(finder.find(choice))) for choice in choices]
    if not any(lacking):
        raise ConfigError("alpha: every module of these LoRAs states its own alpha, so none can be supplied")
    return [
        choice.model_copy(update={"alpha": alpha}) if lacks else choice
        for choice, lacks in zip(choices, lacking, strict=True)
    ]


def parse_request(settings: Mapping[str, Any], finder: LoraFinder) -> GenerateConfig:
    """The configuration of these settings; where a field is wrong, missing LoRA files are reported with it."""
    try:
        return GenerateConfig(**settings)
    except ConfigError as error:
        raise ConfigError(list(dict.fromkeys([*error.problems, *finder.problems(_readable_loras(settings))]))) from None


def check_request(settings: Mapping[str, Any], finder: LoraFinder) -> GenerateConfig:
    """A configuration whose LoRA files exist: what can be known before a model is loaded."""
    config = parse_request(settings, finder)
    if wrong := finder.problems((*config.loras, *config.tagged_loras())):
        raise ConfigError(list(dict.fromkeys(wrong)))
    return config


def _readable_loras(settings: Mapping[str, Any]) -> list[LoraChoice]:
    """The LoRAs of settings that have something wrong elsewhere."""
    choices: list[LoraChoice] = []
    with suppress(ConfigError, TypeError):  # reported as a problem of the field
        choices += parse_loras(settings.get("loras") or ())
    for name in ("prompt", "negative_prompt"):
        for tag in parse(str(settings.get(name) or "")).tags:
            with suppress(ConfigError):
                choices.append(LoraChoice.from_tag(tag))
    return choices
