"""Which file a LoRA choice means: a path, a name in the LoRA folders, or a hash.

    path    of an option or an argument: any file
    name    of a prompt, an image or an option: a file's stem, its path inside a LoRA folder (`styles/pixel`), or
            the name its trainer recorded (`ss_output_name`). It never leaves the LoRA folders; two files with the same
            name are an error that lists them
    hash    SHA-256 or BLAKE3 (64 digits), AutoV3 (12), AutoV2 (10) or AutoV1 (8), computed once per file

An image records the hashes of its LoRAs: `hashes` maps names to them, and a name in it is looked up by its hash
first. Files in a LoRA folder that cannot be read are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from inweave.adapter import Adapter
from inweave.checked import did_you_mean
from inweave.errors import ConfigError, Problem
from inweave.exchange.load import alphas_for, load
from inweave.exchange.lookup import AdapterLookup, ensure_strength, has_hash, hashes_of, is_hash, names_beside
from inweave.files.paths import expand_home, is_file, is_folder, printable_path
from inweave.files.stamps import Stamp, path_stamp
from inweave.formats.alphas import Alphas
from inweave.generate.config import GenerateConfig, LoraChoice, parse_loras
from inweave.generate.prompt import parse
from inweave.generate.templates import PromptSources

__all__ = [
    "LoraFinder", "RequestFinder", "adapter_of", "check_request", "has_hash", "hashes_of", "is_hash", "parse_request",
    "with_alpha",
]  # fmt: skip


class LoraFinder(AdapterLookup):
    """Looks up the adapters of requests; ``hashes``: those recorded in an image, by name."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = (), hashes: Mapping[str, str] | None = None) -> None:
        super().__init__(folders)
        self.hashes: Mapping[str, str] = hashes or {}

    def find(self, choice: LoraChoice) -> Path:
        """Return the file, or raise a ConfigError that lists what there is."""
        if choice.path is not None:
            path = expand_home(choice.path)
            if not is_file(path) and not is_folder(path):
                if (match := self.match_name(choice.path)) is not None:  # `styles/pixel` looks like a path
                    return match
                ensure_strength(choice.path)
                near = did_you_mean(path.name, names_beside(path))
                raise ConfigError(f"LoRA {printable_path(choice.path)}: no such file{near}")
            return path
        if choice.hash is not None:
            return self.by_hash(choice.hash)
        assert choice.name is not None
        digits = self.hashes.get(choice.name)
        if digits is not None and (match := self.with_hash(digits)) is not None:
            return match
        return self.by_name(choice.name)

    def problems(self, choices: Iterable[LoraChoice]) -> list[Problem]:
        """Return why LoRAs cannot be found, one problem each."""
        wrong: list[Problem] = []
        for choice in choices:
            try:
                self.find(choice)
            except ConfigError as error:
                wrong += error.problems
        return wrong


class RequestFinder(LoraFinder):
    """A finder for one request: a LoRA that several checks ask for is looked up once."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]] = (), hashes: Mapping[str, str] | None = None) -> None:
        super().__init__(folders, hashes)
        self._paths: dict[tuple[str | None, ...], Path] = {}

    def find(self, choice: LoraChoice) -> Path:
        key = (choice.path, choice.name, choice.hash)
        if key not in self._paths:
            self._paths[key] = super().find(choice)
        return self._paths[key]


def adapter_of(choice: LoraChoice, path: Path) -> Path | Adapter:
    """Return what to merge for a choice: its file ``path``, or the adapter read with the choice's alpha."""
    if choice.alpha is None:
        return path
    return _scaled_adapter(path, path_stamp(path), json.dumps(choice.alpha, sort_keys=True))


@lru_cache(maxsize=64)
def _scaled_adapter(path: Path, stamp: Stamp, alpha: str) -> Adapter:
    return load(path, alpha=json.loads(alpha))


def with_alpha(choices: Sequence[LoraChoice], finder: LoraFinder, alpha: Alphas) -> list[LoraChoice]:
    """Return the choices with ``alpha`` for each file that states none; raise ConfigError if all files state one."""
    alphas = alphas_for([finder.find(choice) for choice in choices], alpha)
    return [
        choice if each is None else choice.model_copy(update={"alpha": each})
        for choice, each in zip(choices, alphas, strict=True)
    ]


def parse_request(settings: Mapping[str, Any], finder: LoraFinder) -> GenerateConfig:
    """Return the configuration of these settings; missing LoRA files are reported with the fields that are wrong."""
    try:
        return GenerateConfig(**settings)
    except ConfigError as error:
        raise ConfigError(list(dict.fromkeys([*error.problems, *finder.problems(_readable_loras(settings))]))) from None


def check_request(
    settings: Mapping[str, Any], finder: LoraFinder, prompts: PromptSources | None = None
) -> GenerateConfig:
    """Return the configuration of these settings, whose LoRA files exist; no model is needed for these checks.

    ``prompts``: resolve choices and styles, to check the LoRAs that they name.
    """
    config = parse_request(settings, finder)
    resolved = config if prompts is None else prompts.resolve(config)
    if wrong := finder.problems((*resolved.loras, *resolved.tagged_loras())):
        raise ConfigError(list(dict.fromkeys(wrong)))
    return config


def _readable_loras(settings: Mapping[str, Any]) -> list[LoraChoice]:
    """Return the readable LoRAs of settings that are invalid."""
    choices: list[LoraChoice] = []
    with suppress(ConfigError, TypeError):  # reported as a problem of the field
        choices += parse_loras(settings.get("loras") or ())
    for name in ("prompt", "negative_prompt"):
        for tag in parse(str(settings.get(name) or "")).tags:
            with suppress(ConfigError):
                choices.append(LoraChoice.from_tag(tag))
    return choices
