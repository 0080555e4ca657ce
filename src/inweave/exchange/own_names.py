"""The index of an unknown model, from the names in an adapter: enough for dialects that do not change them."""

from __future__ import annotations

from inweave.adapter import Adapter, Entry
from inweave.targets.index import Component, ModelIndex
from inweave.targets.tables import OWN


def own_names(adapter: Adapter) -> ModelIndex:
    """Return the index of an unknown model from the names in the adapter, which is enough if names do not change."""
    shapes = {}
    for entry in adapter:
        shape = entry.factors.stored_shape()
        rows = max(entry.factors.replaced_rows or (), default=0) + 1
        name = f"transformer.{entry.ref.name}" if has_own_root(entry) else entry.ref.name
        shapes[f"{name}.{entry.param.removesuffix('?')}"] = tuple(size if size > 0 else rows for size in shape)
    return ModelIndex({"model": Component("model", OWN, "diffusers", shapes)})


def has_own_root(entry: Entry) -> bool:
    """Return whether `transformer` is a language model's own root (Falcon, MPT, GPT): PEFT's keys spell it like a
    pipeline's component.
    """
    return entry.ref.component == "unet" and entry.dialect == "peft"
