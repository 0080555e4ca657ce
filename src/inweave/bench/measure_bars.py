"""The bars of `inweave bench embedded`, through the pipeline that serves every request, whole or a share of each.

    whole     512 captions, 64 x 4 seeds, 48 colors, 24 counts and pairs, 16 seams, 48 + 10 + 24 images with adapters
    share     that share of each, but at least 4

Images of a GPU are made 64 at a time, those of a CPU alone. Adapters that are not given are trained: the style on the
images of a folder, the creature on its six drawings, and for a model other than the shipped one the two styles of the
stack: all with the settings of the embedded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from inweave.bench import adapter_bars, bars
from inweave.bench.bars import Bar
from inweave.bench.judge import load_judge
from inweave.errors import ConfigError
from inweave.files.images import write_png
from inweave.files.writing import make_folder
from inweave.generate.config import GenerateConfig, parse_loras
from inweave.generate.pipeline import Pipeline
from inweave.generate.sheet import Sheet
from inweave.models import embedded

Progress = Callable[[str, int, int], None]
NAMES = ("subjects", "seeds", "colors", "counts", "pairs", "seams", "style", "identity", "stack")
_ON_A_GPU = 64


class PipelineDraw:
    """Makes the images of a bar with one pipeline; ``settings``: steps and guidance, if not the model's own."""

    def __init__(self, pipe: Pipeline, settings: Mapping[str, Any], progress: Progress | None = None) -> None:
        self.pipe, self.settings, self.progress = pipe, settings, progress
        self.activity, self.images = "", 0
        self._at_once = _ON_A_GPU if pipe.model.device.type == "cuda" else 1

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], *, loras: Sequence[str] = (),
        init: Image.Image | None = None, mask: Image.Image | None = None,
    ) -> list[Image.Image]:  # fmt: skip
        own = {**self.settings, **({"strength": 1.0} if mask is not None else {})}
        configs = [
            GenerateConfig(prompt=prompt, seed=seed, loras=parse_loras(loras), **own)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        made: list[Image.Image] = []
        for start in range(0, len(configs), self._at_once):
            some = configs[start : start + self._at_once]
            for result in self.pipe(some, init=init, mask=mask, batch=self._at_once):
                if result.error is not None:
                    raise result.error
                made += result.images
            self.images += len(some)
            if self.progress is not None:
                self.progress(self.activity, len(made), len(prompts))
        return made


def measure_bars(
    pipe: Pipeline,
    names: Sequence[str],
    *,
    model: str = embedded.NAME,
    share: float = 1.0,
    settings: Mapping[str, Any] | None = None,
    held_out: Path | None = None,
    loras: Mapping[str, str] | None = None,
    training: Mapping[str, Any] | None = None,
    sheets: Path | None = None,
    progress: Progress | None = None,
) -> list[Bar]:
    """Measure the bars of these names; ``loras``: adapters for "style" and "identity" that are not to be trained."""
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"no bar is called {', '.join(map(repr, unknown))}; known are {', '.join(NAMES)}")
    if "style" in names and held_out is None:
        raise ConfigError(
            "the bar 'style' needs --held-out FOLDER: 24 captioned images of a set that is in no training"
        )
    referee, given_loras = load_judge(), loras or {}
    draw = PipelineDraw(pipe, settings or {}, progress)

    def some(whole: int) -> int:
        return min(whole, max(4, round(whole * share)))

    measured: list[Bar] = []
    with TemporaryDirectory() as place:
        own = {} if model == embedded.NAME else embedded.PRESET
        train = adapter_bars.trainer(model, Path(place), {**own, **(training or {})}, progress)
        for name in names:
            draw.activity = name
            if name == "subjects":
                rows = [bars.subjects(draw, referee, some(512))]
            elif name == "seeds":
                rows = [bars.seeds(draw, referee, some(64))]
            elif name == "colors":
                rows = [bars.colors(draw, referee, some(48))]
            elif name == "counts":
                rows = [bars.counts(draw, some(24))]
            elif name == "pairs":
                rows = [bars.pairs(draw, referee, some(24))]
            elif name == "seams":
                rows = [bars.seams(draw, some(16))]
            elif name == "style":
                assert held_out is not None
                lora = given_loras.get("style") or str(train("style", held_out))
                rows = adapter_bars.style(draw, referee, lora, held_out, some(48))
            elif name == "identity":
                cover = adapter_bars.write_creature(Path(place) / "creature")
                lora = given_loras.get("identity") or str(train("identity", cover))
                rows = adapter_bars.identity(draw, referee, lora, some(10))
            else:
                styles = embedded.styles()[:2]
                if model != embedded.NAME:  # the shipped adapters belong to the shipped weights
                    styles = tuple(str(train(style, embedded.style_folder(style))) for style in styles)
                rows = [adapter_bars.stack(draw, referee, styles, some(24))]
            measured += rows
            if sheets is not None:
                _write_sheets(rows, sheets)
    return measured


def _write_sheets(rows: Sequence[Bar], folder: Path) -> None:
    make_folder(folder)
    for row in rows:
        images, columns = list(row.images)[:96], 12
        cells = [images[i : i + columns] for i in range(0, len(images) // columns * columns, columns)]
        cells = cells or ([images] if images else [])
        if cells:
            write_png(folder / f"{row.name.replace(' ', '-')}.png", Sheet(cells, [], []).render())
