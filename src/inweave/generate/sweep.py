"""The same request many times, with one or two settings changed: sweeps and comparisons.

The settings of a table are in `inweave.generate.axes`. One axis gives a row, two give a table. A comparison has a
column without LoRAs, one for each LoRA alone, and, where there are several, one for all of them together, always from
the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from inweave.errors import ConfigError, Problem
from inweave.generate.axes import Axis, Cell, cells_of
from inweave.generate.batches import Batch
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.denoise import Callbacks, Progress
from inweave.generate.find import LoraFinder
from inweave.generate.images import ImageInput
from inweave.generate.pipeline import Pipeline
from inweave.generate.prompt import strip_tags
from inweave.generate.result import Result
from inweave.generate.sheet import Sheet

#: returns a pipeline with a model; the one before is not used any more
OpenModel = Callable[[str], Pipeline]
OpenAny = Callable[[str | None], Pipeline]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The sheet of a sweep, and the result of every cell.

    ``record``: the settings to write into the sheet: those of the request, its axes, and those of every cell.
    """

    sheet: Sheet
    results: list[list[Result]]
    record: dict[str, Any]


def sweep(
    pipe: Pipeline, config: GenerateConfig, axes: Sequence[Axis], *, open_model: OpenModel | None = None, **options: Any
) -> SweepResult:
    """Generate one image for every value of every axis; all are checked before the first is made.

    Args:
        pipe: makes the images, unless an axis names models.
        config: the request.
        axes: one, or one across and one down.
        open_model: opens the models of an axis.
        **options: those of `run`.
    """
    cells = cells_of(config, axes)
    if any(axis.name == "model" for axis in axes) and open_model is None:
        raise ConfigError(Problem("grid", "there are no other models to open here"))
    across, down = axes[0], axes[1] if len(axes) == 2 else None
    labels = [down.label(value) for value in down.values] if down else []
    columns = [across.label(value) for value in across.values]
    texts = [axis.text for axis in axes]
    return run(pipe, cells, columns, labels, config, axes=texts, open_model=open_model, **options)


def compare(pipe: Pipeline, config: GenerateConfig, **options: Any) -> SweepResult:
    """Generate the same seeds without LoRAs, with each one, and with all, those tagged in the prompts included."""
    request, config = config, _without_tags(config)
    if not config.loras:
        raise ConfigError("compare: there is no LoRA to compare with; add one with --lora")
    stacks: list[tuple[str, tuple[LoraChoice, ...]]] = [("no LoRA", ())]
    stacks += [(f"{lora.label.rpartition('/')[2]} {_strength_label(lora)}", (lora,)) for lora in config.loras]
    if len(config.loras) > 1:
        stacks.append(("all", config.loras))
    seed = config.seed if config.seed is not None else 0
    seeds = [seed + number for number in range(config.count)]
    table = [
        [Cell(config.model_copy(update={"loras": stack, "seed": each, "count": 1})) for _, stack in stacks]
        for each in seeds
    ]
    labels = [f"seed {each}" for each in seeds] if len(seeds) > 1 else []
    return run(pipe, table, [name for name, _ in stacks], labels, request, **options)


def run(
    pipe: Pipeline | None,
    table: Sequence[Sequence[Cell]],
    columns: Sequence[str],
    rows: Sequence[str],
    request: GenerateConfig,
    *,
    axes: Sequence[str] = (),
    open_model: OpenAny | OpenModel | None = None,
    init: ImageInput | None = None,
    mask: ImageInput | None = None,
    progress: Callable[[Progress], object] | None = None,
    cancelled: Callable[[], bool] | None = None,
    batch: Batch | None = None,
    finder: LoraFinder | None = None,
) -> SweepResult:
    """Generate a table of requests; those of a model are prepared first, so that an invalid one stops it.

    Cells that share model, stack, size, steps and sampler are made together, as many as ``batch`` says.
    ``request``: what they were made from, with ``axes``.
    """
    cells = list(chain.from_iterable(table))
    models = list(dict.fromkeys(cell.model for cell in cells))
    made: dict[int, Result] = {}
    for place, name in enumerate(models):
        numbers = [number for number, cell in enumerate(cells) if cell.model == name]
        own = None  # so that the model before may make room
        own = _opened(pipe, open_model, name)
        if place == 0:
            base = own.prepare(request, init, mask, finder=finder)
            record = own.record(base)
        prepared = [own.prepare(cells[number].config, init, mask, finder=finder) for number in numbers]
        prepared = [replace(each, init=base.init, mask=base.mask) if not each.parts else each for each in prepared]
        callbacks = Callbacks(_counted(progress, place, len(models)), cancelled=cancelled)
        made |= zip(numbers, own.run_all(prepared, callbacks, batch=batch), strict=True)
    for result in made.values():
        if result.error is not None:
            raise result.error
    ordered = iter([made[number] for number in range(len(cells))])
    results = [[next(ordered) for _ in line] for line in table]
    images = [[result.images[0] for result in line] for line in results]
    settings = [[result.records[0]["config"] for result in line] for line in results]
    grid = {"axes": list(axes), "columns": list(columns), "rows": list(rows), "cells": len(cells), "settings": settings}
    template = base.config.template
    title = base.config.prompts[0].text if template is None else template.prompt
    return SweepResult(Sheet(images, columns, rows, title), results, record | {"grid": grid})


def _opened(pipe: Pipeline | None, open_model: OpenAny | OpenModel | None, name: str | None) -> Pipeline:
    """Return the pipeline of a cell: ``pipe``, unless it names a model or there is none."""
    if open_model is not None and (name is not None or pipe is None):
        return open_model(name)  # type: ignore[arg-type]
    assert pipe is not None, "the table is made by a pipeline"
    return pipe


def _counted(
    progress: Callable[[Progress], object] | None, place: int, models: int
) -> Callable[[Progress], object] | None:
    """Return a callback that counts the steps of all models."""
    if progress is None or models == 1:
        return progress
    return lambda at: progress(replace(at, all_passes=(place * at.work + at.done, models * at.work)))


def _without_tags(config: GenerateConfig) -> GenerateConfig:
    """Return the same request with the LoRAs of its tags in its list."""
    tagged = config.tagged_loras()
    if not tagged:
        return config
    texts = {name: strip_tags(getattr(config, name)) for name in ("prompt", "negative_prompt")}
    return config.model_copy(update={**texts, "loras": (*config.loras, *tagged)})


def _strength_label(lora: LoraChoice) -> str:
    strengths = lora.strengths()
    te, unet = strengths["te"], strengths["unet"]
    return f"{unet:g}" if te == unet else f"{te:g}/{unet:g}"
