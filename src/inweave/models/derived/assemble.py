"""Pipelines of live parts, and the parts that are neither networks nor tokenizers: processors and guiders.

A processor is made of its tokenizer and chat template alone, since a caption has no images: the image and video halves
need libraries of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from inweave.errors import FormatError
from inweave.models.configuration import diffusers_config, library_errors, read_config
from inweave.models.lazy_imports import defer_imports
from inweave.models.tokenizers import make_tokenizer, read_template

GUIDER = "guider_config.json"


def assemble(kind: Any, parts: Mapping[str, Any], options: Mapping[str, Any], device: torch.device) -> Any:
    """Return a pipeline of these parts that runs on ``device``; parts it has and nobody gave are None."""
    expected, _ = kind._get_signature_keys(kind)
    place = property(lambda self: device)
    with library_errors(f"{kind.__name__}: it cannot be made of these parts"), defer_imports():
        running = type(kind.__name__, (kind,), {"_execution_device": place, "device": place})
        known = inspect.signature(kind.__init__).parameters
        return running(**{part: parts.get(part) for part in expected if part in known}, **options)


def make_processor(folder: Path, kind: Any) -> Any:
    """Return the processor of a folder for texts without images."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise FormatError(f"{folder}: it holds no tokenizer; a {kind.__name__} reads captions with one")
    tokenizer = make_tokenizer(folder, AutoTokenizer)
    parts = dict.fromkeys(kind.get_attributes()) | {"tokenizer": tokenizer}
    text_only = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, part: type(part)})
    with library_errors(f"{folder}: this processor cannot be made for texts without images"):
        return text_only(**parts, chat_template=read_template(folder))


def make_guider(folder: Path, kind: Any, guidance: float | None) -> Any:
    """Return the guider of a folder with this strength of guidance, or its own."""
    settings = diffusers_config(str(folder / GUIDER), kind, read_config(folder / GUIDER))
    own = settings.get(
        "guidance_scale", getattr(inspect.signature(kind).parameters.get("guidance_scale"), "default", 0)
    )
    if guidance is not None and guidance != own:
        settings["guidance_scale"] = guidance
    with library_errors(f"{folder}: no {kind.__name__} can be made of these settings"):
        return kind.from_config(settings)


def is_plain(value: Any) -> bool:
    """Return whether a value of a model_index.json is an option of its pipeline, and not a part."""
    if isinstance(value, list):
        return len(value) < 1024 and all(type(each) in (bool, int, float) for each in value)
    return isinstance(value, bool | int | float | str)
