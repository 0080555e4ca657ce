"""Find a model by the name a user gives: `inweave/emoji`, a folder, a checkpoint file, or an id on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from inweave.checked import did_you_mean
from inweave.errors import ConfigError, RequestError
from inweave.files.paths import expand_home, is_file, is_folder
from inweave.models import embedded
from inweave.models.blueprint import Blueprint
from inweave.models.configuration import read_config
from inweave.models.derived.folder import is_unknown_pipeline, open_pipeline
from inweave.models.families import family_named
from inweave.models.families.base import Variant
from inweave.models.folder import PartFiles, open_folder
from inweave.models.single import open_single
from inweave.models.variants import find_variant, variants, variants_by_name

#: weights as safetensors, configurations as JSON; no code and no pickle is ever fetched
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*/*.txt", "tokenizer*/*.model")
HUB_IGNORED = (
    "*.fp16.safetensors", "*.non_ema.safetensors", "safety_checker/*", "feature_extractor/*", "*/flax*", "*/openvino*",
)  # fmt: skip
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def open_model(
    where: str | os.PathLike[str],
    *,
    variant: str | None = None,
    config: str | os.PathLike[str] | None = None,
    parts: PartFiles | None = None,
    allow_download: bool = False,
) -> Blueprint:
    """Return the blueprint of a model: built in, a folder, a file, or on the hub."""
    chosen = _variant(variant)
    path = expand_home(where)
    text = os.fspath(where)
    if is_file(path):
        return open_single(path, variant=chosen, config=config, parts=parts)
    if config is not None:
        raise ConfigError(f"{text}: a folder has its own configurations; config is for single-file checkpoints")
    if text == embedded.NAME:
        return open_folder(embedded.folder(), name=embedded.NAME, variant=embedded.VARIANT, parts=parts)
    if is_folder(path):
        index_file = path / "model_index.json"
        if not parts and is_file(index_file) and is_unknown_pipeline(path, index := read_config(index_file)):
            return open_pipeline(path, path.name, index)
        return open_folder(path, variant=chosen, parts=parts)
    known, repo = find_variant(text), hub_id(text)
    folder = hub_folder(repo, allow_download)
    if not parts and is_unknown_pipeline(folder, index := read_config(folder / "model_index.json")):
        return open_pipeline(folder, repo, index)
    return open_folder(folder, name=repo, variant=chosen or known, parts=parts)


def hub_id(text: str) -> str:
    """Return the repository of a model that is not a path: `owner/name`, or that of a known name such as `sdxl`."""
    known = find_variant(text)
    if known is not None and "/" not in text:
        family_named(known.family).refuse_relative(text)
    repo = known.repo if known is not None and "/" not in text else text
    if not HUB_ID.fullmatch(repo) or text.endswith(".safetensors"):
        raise ConfigError(
            f"{text}: no such file or folder, and no model has this name{_near(text)}; {embedded.NAME} is built in"
        )
    return repo


def _variant(text: str | None) -> Variant | None:
    if text is None:
        return None
    variant = find_variant(text)
    if variant is None:
        raise ConfigError(
            f"no model variant is called {text!r}{_near(text)}; known are {', '.join(v.name for v in variants())}"
        )
    return variant


def _near(text: str) -> str:
    """Return a suggestion of a similar known name; nothing if the name is known."""
    known = [embedded.NAME, *variants_by_name()]
    return "" if text.lower() in known else did_you_mean(text.lower(), known)


def hub_folder(repo: str, allowed: bool) -> Path:
    """Return a snapshot from the hub's cache, or downloaded where that is allowed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo, allow_patterns=[*HUB_PATTERNS], ignore_patterns=[*HUB_IGNORED], local_files_only=not allowed
            )
        )
    except LocalEntryNotFoundError:
        how = "it could not be reached" if allowed else "downloading is off; allow it with --allow-download"
        raise RequestError(f"{repo}: not on this machine{_near(repo)}, and {how}") from None
    except Exception as error:  # those of the hub's library, and of the library that it sends requests with
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RequestError(f"{repo}: the hub refused: {text}") from None
