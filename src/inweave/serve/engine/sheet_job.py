"""A job that makes many images and returns them as one: a sheet with titles.

    sheet = {"axes": ["seed=1,2"], "columns": ["seed 1", "seed 2"], "rows": [],
             "cells": [[{"config": {...}, "model": null}, ...], ...]}

Every cell is a complete request, whose choices and styles are resolved; ``model`` is one of the ``models`` of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from inweave.generate.axes import Cell
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Progress
from inweave.generate.find import LoraFinder
from inweave.generate.pipeline import Pipeline
from inweave.generate.result import Result
from inweave.generate.sweep import run


def make_sheet(
    sheet: Mapping[str, Any],
    config: GenerateConfig,
    load: Callable[[str | None], Pipeline],
    *,
    init: Image.Image | None,
    mask: Image.Image | None,
    finder: LoraFinder,
    progress: Callable[[Progress], object],
    cancelled: Callable[[], bool],
) -> Result:
    """Return the sheet as the one image of a result.

    Args:
        sheet: as above.
        config: the request that the cells were made from.
        load: returns a model by its name, None the one of the job.
        init: the image to start from.
        mask: white where to repaint.
        finder: the LoRAs of all cells.
        progress: called after each step.
        cancelled: called before each step.
    """
    table = [[Cell(GenerateConfig(**cell["config"]), cell["model"]) for cell in row] for row in sheet["cells"]]
    made = run(
        None, table, sheet["columns"], sheet["rows"], config, axes=sheet["axes"], open_model=load, init=init, mask=mask,
        progress=progress, cancelled=cancelled, finder=finder,
    )  # fmt: skip
    results = [result for row in made.results for result in row]
    loras = {lora.name: lora for result in results for lora in result.loras}
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    seconds = sum(result.swap_seconds for result in results)
    return Result([made.sheet.render()], [made.record], list(loras.values()), list(warnings), seconds)
