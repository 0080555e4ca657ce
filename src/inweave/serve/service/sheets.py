"""Sheets: a request with axes as a table of complete requests, checked before the job is queued."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inweave.errors import ConfigError, Problem
from inweave.generate.axes import Axis, Cell, cells_of
from inweave.generate.config import GenerateConfig
from inweave.generate.templates import PromptSources
from inweave.serve.service.models import Models

#: of all cells together
MAX_PIXELS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SheetRequest:
    """The axes of a sheet and its cells; ``models``: those that an axis names."""

    axes: tuple[Axis, ...]
    table: list[list[Cell]]
    models: list[str]

    @classmethod
    def of(cls, config: GenerateConfig, texts: Sequence[str], sources: PromptSources, models: Models) -> SheetRequest:
        """Return the sheet of a request; raise ConfigError if it cannot be made, MissingError for a model."""
        axes = [Axis.parse(text) for text in texts]
        axes = [
            Axis("model", tuple(models.name(str(value)) for value in axis.values)) if axis.name == "model" else axis
            for axis in axes
        ]
        if config.seed in (None, -1):  # cells share it
            config = config.model_copy(update={"seed": secrets.randbits(32)})
        table = [[Cell(sources.resolve(cell.config), cell.model) for cell in row] for row in cells_of(config, axes)]
        sheet = cls(tuple(axes), table, list(dict.fromkeys(cell.model for row in table for cell in row if cell.model)))
        sides = [(each.width or 512, each.height or 512) for each in sheet.configs]
        sizes = [each.upscale.size_of(size) if each.upscale else size
                 for each, size in zip(sheet.configs, sides, strict=True)]  # fmt: skip
        if sum(width * height for width, height in sizes) > MAX_PIXELS:
            reason = f"its {len(sizes)} images have more than {MAX_PIXELS:,} pixels; use fewer or smaller ones"
            raise ConfigError(Problem("grid", reason))
        return sheet

    @property
    def configs(self) -> list[GenerateConfig]:
        """The requests of all cells."""
        return [cell.config for row in self.table for cell in row]

    def stored(self, stored: Callable[[GenerateConfig], dict[str, Any]]) -> dict[str, Any]:
        """Return the sheet as the queue stores it; ``stored`` gives the settings of a request."""
        down = self.axes[1] if len(self.axes) == 2 else None
        return {
            "axes": [axis.text for axis in self.axes],
            "columns": [self.axes[0].label(value) for value in self.axes[0].values],
            "rows": [down.label(value) for value in down.values] if down else [],
            "cells": [[{"config": stored(cell.config), "model": cell.model} for cell in row] for row in self.table],
        }
