"""The models that requests may name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from inweave.errors import InweaveError, MissingError
from inweave.exchange.load import open_base
from inweave.files.documents import read_json
from inweave.files.paths import is_file
from inweave.models import embedded
from inweave.models.variants import find_variant, most_references


class Models:
    """Models by name; the first one is used by requests that name none."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table
        self.names = tuple(table)
        self._bases: dict[str, str | None] = {}
        self._references: dict[str, int] = {}

    def name(self, name: str | None) -> str:
        """Return the name of a model that may be used; None is the worker's own."""
        if name is None:
            return self.names[0]
        if name in self._table:
            return name
        if (variant := find_variant(name)) is not None:
            for served, where in self._table.items():
                if where == variant.repo:  # the same model by another of its names
                    return served
        raise MissingError(f"model {name[:200]}: not served here; there are {', '.join(self.names)}")

    def location(self, name: str) -> str:
        """Return the path, hub id or built-in name of a model."""
        if name not in self._table:
            raise MissingError(f"model {name}: no longer served here")
        return self._table[name]

    def weights(self, name: str) -> str:
        """Return the location of the weights that adapters are compared with."""
        where = self.location(name)
        return str(embedded.folder()) if where == embedded.NAME else where

    async def base(self, name: str) -> str | None:
        """Return the base that a model's tensors belong to; None if it is unknown."""
        if name not in self._bases:
            self._bases[name] = await asyncio.to_thread(_base_name, self.weights(name))
        return self._bases[name]

    async def facts(self, name: str) -> dict[str, Any]:
        """Return the base of a model, and the defaults of requests as far as the base decides them."""
        base = await self.base(name)
        variant = embedded.VARIANT if base == embedded.NAME else find_variant(base) if base is not None else None
        defaults = None
        if variant is not None:
            defaults = {"size": variant.size, "steps": variant.steps, "guidance": variant.guidance}
        return {"base": base, "defaults": defaults, "references": await self.references(name)}

    async def references(self, name: str) -> int:
        """Return how many reference images a model reads; no weights are read."""
        if name not in self._references:
            where, base = self.location(name), await self.base(name)
            self._references[name] = await asyncio.to_thread(_references, where, base)
        return self._references[name]


def _references(where: str, base: str | None) -> int:
    index, pipeline = Path(where) / "model_index.json", ""
    if is_file(index):
        try:
            pipeline = str(read_json(index).get("_class_name"))
        except InweaveError:
            return 0
    return most_references(pipeline, where.rpartition("/")[2].removesuffix(".safetensors"), base)


def _base_name(where: str) -> str | None:
    try:
        return open_base(where).base
    except InweaveError:
        return None
