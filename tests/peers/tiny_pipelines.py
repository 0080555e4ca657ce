"""Tiny text-to-image pipelines of classes that no family knows, with random weights in the libraries' networks.

`tiny_transformers` holds the makers. A pipeline goes by the name of its class, without "Pipeline".
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tests.peers import tiny_transformers
from tests.peers.tiny_models import randomise

_KEEP = tempfile.TemporaryDirectory(prefix="inweave-tiny-")
_MAKERS: dict[str, Callable[[], Any]] = tiny_transformers.MAKERS

#: those that cannot be derived, and why
REFUSED = {
    "CogView4Control": "does not run from a text and a size",
    "HunyuanImageRefiner": "does not run from a text and a size",
    "Ideogram4": "denoises with transformer, unconditional_transformer; one network should",
    "SanaSprint": "'trigflow' is neither a flow nor a diffusion",
}
DERIVED = tuple(name for name in _MAKERS if name not in REFUSED)


@cache
def folder(name: str) -> Path:
    """The pipeline of this class as diffusers saves it."""
    path = Path(_KEEP.name) / name
    pipeline(name).save_pretrained(path, safe_serialization=True)
    return path


@cache
def pipeline(name: str) -> Any:
    """The pipeline that is saved; it must not be changed."""
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    pipe = _MAKERS[name]()
    for number, (_, part) in enumerate(sorted(pipe.components.items())):
        if isinstance(part, torch.nn.Module):
            randomise(part.eval(), number)
    return pipe
