"""The bars of adapters trained on the embedded model with its default settings, measured by the judge.

    style         24 captioned images of a set that the model has not seen: share of subjects that are in none of them
                  and recognized at strength 1; and by how much the style distance to the set falls
    identity      six drawings of an invented creature: share of new contexts in which the judge finds the creature;
    drift         and how much images without its name change, over how much images of two subjects differ
    stack         two styles at strength 0.7 each: share of subjects recognized

An image is recognized if its subject is the first of the judge's answers, of five in brackets. The creature is found if
the image or a half of it is nearer to the drawings' mean look than to any subject's direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from inweave.bench.bars import Bar, Draw, difference, spread_over, sure_subjects
from inweave.bench.creature import CONTEXTS, TRIGGER, drawings
from inweave.bench.embedded import closer_to_style
from inweave.bench.judge import Floats, Judge, unit
from inweave.errors import ConfigError
from inweave.files.images import open_image, write_png
from inweave.files.writing import make_folder, write_text
from inweave.training.config.schema import TrainConfig
from inweave.training.session import train

Settings = Mapping[str, Any]
#: name of the run, folder of captioned images -> path of the adapter
Train = Callable[[str, Path], Path]


def trainer(
    model: str, folder: Path, settings: Settings | None = None, progress: Callable[[str, int, int], None] | None = None
) -> Train:
    """Return what trains an adapter by the model's own settings, or with others of them, into ``folder``."""

    def run(name: str, images: Path) -> Path:
        def on_record(record: Mapping[str, Any]) -> None:
            if progress is not None and "loss" in record:
                progress(f"training {name}", record["step"], record["total"])

        config = TrainConfig.of(
            **{"seed": 0, **(settings or {})}, model=model, dataset=str(images), name=name, output=str(folder / name),
            cache_dir=str(folder / f"{name}-cache"),
        )  # fmt: skip
        return train(config, on_record=on_record).path

    return run


def captioned_images(folder: Path) -> tuple[list[str], list[Image.Image]]:
    """Return the captions and images of a folder."""
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise ConfigError(f"{folder}: no PNG image with a caption beside it; tools/embedded/held_out.py writes them")
    images = []
    for path in paths:
        with open_image(path) as opened:
            images.append(opened.convert("RGB"))
    return [path.with_suffix(".txt").read_text().strip() for path in paths], images


def unseen_subjects(referee: Judge, captions: Sequence[str], count: int, held_out: str) -> list[str]:
    """Return subjects that no caption names, and that the judge knows in the drawings of the held-out set."""
    known: list[str] = referee.facts.get(f"right_in_{held_out}", sure_subjects(referee))
    sure = {*sure_subjects(referee)}
    return spread_over([name for name in known if name in sure and name not in captions], count)


def style(draw: Draw, referee: Judge, lora: str, folder: Path, count: int = 48, strength: float = 1.0) -> list[Bar]:
    """Measure an adapter that was trained on the images of ``folder``."""
    captions, images = captioned_images(folder)
    names = unseen_subjects(referee, captions, count, folder.name)
    base = draw(names, range(len(names)))
    styled = draw(names, range(len(names)), loras=[f"{lora}:{strength:g}"])
    right, five = referee.right(styled, names), referee.right(styled, names, 5)
    without = closer_to_style(base, images, base)["to_style"]
    distance = closer_to_style(styled, images, base)["to_style"]
    floor = closer_to_style(images[::2], images[1::2], base)["to_style"]
    visible = [image for pair in zip(base, styled, strict=True) for image in pair]
    labels = [
        label for name, seen in zip(names, referee.nearest(styled), strict=True) for label in (name, f"as {seen}")
    ]
    at = f"strength {strength:g}, {len(names)} subjects"
    return [
        Bar("style subjects", right, 0.8, detail=f"{at} ({five:.3f})", images=visible, labels=labels),
        Bar(
            "style distance",
            1 - distance / without,
            0.6,
            detail=f"{at}: {without:.2f} to {distance:.2f}; {floor:.2f} between halves of the set",
        ),
    ]


def identity(draw: Draw, referee: Judge, lora: str, count: int = 10) -> list[Bar]:
    """Measure an adapter that was trained on the creature's drawings."""
    known = unit(referee.looks([image for image, _ in drawings()]).mean(0, keepdims=True))[0]
    contexts = CONTEXTS[:count]
    made = draw(contexts, range(len(contexts)), loras=[lora])
    answers = [_has_creature(referee, known, image) for image in made]
    without = [_has_creature(referee, known, image) for image in draw(contexts, range(len(contexts)))]
    names = spread_over(sure_subjects(referee), 2 * count)
    base = draw(names, range(len(names)))
    changed = draw(names, range(len(names)), loras=[lora])
    drift = float(np.mean([difference(*pair) for pair in zip(base, changed, strict=True)]))
    apart = float(np.mean([difference(*pair) for pair in zip(base, base[1:] + base[:1], strict=True)]))
    return [
        Bar("identity", float(np.mean(answers)), 0.8, images=made, labels=contexts,
            detail=f"{len(contexts)} contexts of {TRIGGER!r}; without the adapter {np.mean(without):.2f}"),
        Bar("drift", drift / apart, 0.1, True, f"{len(names)} subjects: {drift:.2f} of 255; two subjects: {apart:.2f}",
            images=changed, labels=names),
    ]  # fmt: skip


def write_creature(folder: Path) -> Path:
    """Write the drawings and their captions; return the folder."""
    make_folder(folder)
    for number, (image, caption) in enumerate(drawings()):
        write_png(folder / f"{number}.png", image)
        write_text(folder / f"{number}.txt", caption + "\n")
    return folder


def stack(draw: Draw, referee: Judge, loras: Sequence[str], count: int = 24, strength: float = 0.7) -> Bar:
    names = spread_over(sure_subjects(referee), count)
    images = draw(names, range(len(names)), loras=[f"{lora}:{strength:g}" for lora in loras])
    five = referee.right(images, names, 5)
    detail = f"{' + '.join(Path(lora).stem for lora in loras)} at {strength:g}, {len(names)} subjects ({five:.3f})"
    return Bar("stack", referee.right(images, names), 0.8, detail=detail, images=images, labels=names)


def _has_creature(referee: Judge, known: Floats, image: Image.Image) -> bool:
    width, height = image.size
    left, top = width // 2, height // 2
    boxes = ((0, 0, width, height), (0, 0, left, height), (left, 0, width, height), (0, 0, width, top),
             (0, top, width, height))  # fmt: skip
    looks = referee.looks([image.crop(box) for box in boxes])
    return bool((looks @ known > (looks @ referee.directions.T).max(1)).any())
