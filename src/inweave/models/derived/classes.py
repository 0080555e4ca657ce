"""The classes that a model_index.json may name: pipelines, networks and tokenizers of the installed libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from inweave.models.lazy_imports import defer_imports

NETWORKS = {"diffusers": "ModelMixin", "transformers": "PreTrainedModel"}


def network_class(library: Any, name: Any) -> Any:
    """Return the network of this name; None if the library has none."""
    return _class(library, name, NETWORKS[library]) if library in NETWORKS else None


def pipeline_class(name: Any) -> Any:
    """Return diffusers' pipeline of this name; None if it has none."""
    return _class("diffusers", name, "DiffusionPipeline")


def tokenizer_class(name: Any) -> Any:
    """Return the tokenizer of this name; None if transformers has none."""
    return _class("transformers", name, "PreTrainedTokenizerBase")


def _class(library: str, name: Any, base: str) -> Any:
    if not isinstance(name, str) or not name.isidentifier():
        return None
    with defer_imports():
        module = import_module(library)
        kind = getattr(module, name, None)
        return kind if isinstance(kind, type) and issubclass(kind, getattr(module, base)) else None
