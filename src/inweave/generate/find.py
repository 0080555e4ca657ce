"""Which file a LoRA choice means: a path, a name in the LoRA folders, or a hash.

A name is a file's stem, or else the name its trainer recorded (`ss_output_name`); two files with the same name are
an error that lists them. Hashes are SHA-256, AutoV2 (10 digits) or AutoV3 (12 digits), computed once per file.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from inweave.adapter import Adapter
from inweave.errors import ConfigError, FormatError
from inweave.exchange.hashes import Hashes, hash_file
from inweave.exchange.load import load
from inweave.formats.alphas import Alphas, lacks_alpha
from inweave.formats.files import read_header
from inweave.generate.config import GenerateConfig, LoraChoice, parse_loras
from inweave.generate.prompt import parse
from inweave.models import embedded


class LoraFinder:
    """Looks adapters up in ``folders``, then among those that come with the package."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.folders: Sequence[Path] = [Path(folder).expanduser() for folder in folders]

    def files(self) -> list[Path]:
        """All adapters there are, the package's last."""
        own = [path for folder in self.folders for path in sorted(folder.rglob("*.safetensors"))]
        return [*own, *embedded.loras().values()]

    def find(self, choice: LoraChoice) -> Path:
        """The file, or a `ConfigError` that lists what there is."""
        if choice.path is not None:
            path = Path(choice.path).expanduser()
            if not path.exists():
                raise ConfigError(f"LoRA {choice.path}: no such file")
            return path
        if choice.hash is not None:
            return self._by_hash(choice.hash)
        assert choice.name is not None
        if Path(choice.name).is_file():
            return Path(choice.name)
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
        matches = [path for path in files if path.stem == name or path.name == name]
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
            names = sorted({path.stem for path in files})
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names[:20]) or 'none'}"
            where = ", ".join(str(folder) for folder in self.folders) or "no LoRA folder was given"
            raise ConfigError(f"LoRA {name}: not found ({where}); {hint}")
        return next(iter(distinct.values()))

    def _by_hash(self, text: str) -> Path:
        digits = text.lower().removeprefix("0x")
        if len(digits) not in (10, 12, 64) or any(digit not in "0123456789abcdef" for digit in digits):
            raise ConfigError(f"LoRA hash {text!r}: expected 10 (AutoV2), 12 (AutoV3) or 64 (SHA-256) hex digits")
        for path in self.files():
            hashes = hashes_of(path)
            if digits in (hashes.sha256, hashes.autov2, hashes.autov3):
                return path
        raise ConfigError(f"LoRA hash {text}: none of {len(self.files())} files has it")


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
    status = path.stat()
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
