"""The settings recorded in an image, by inweave or by another program."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class ImageSettings:
    """``config``: fields of `GenerateConfig`, not checked yet; one line in ``warnings`` for each thing it leaves out.

    ``model``: name and hash. ``hashes``: of LoRAs, by the name the prompt or the list of LoRAs calls them. ``inputs``:
    the images it was made from, which only their owner can name. ``loras``: what else is known of them. ``unknown``:
    samplers and schedules that inweave does not have, by the field they would be. ``axes``: of a sheet, as `--grid`
    spells them.
    """

    config: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    loras: list[Any] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    axes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
