"""The steps of the demo; each leaves an image and the commands that make it.

1  base       a sheet of images without LoRAs
2  training   a style LoRA from the bundled images, with its loss curve
3  strength   the same seeds at strength 0, 0.5 and 1
4  stack      two LoRAs, each by itself and together
5  edit       image to image, and inpainting
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from inweave.bench.embedded import style_set
from inweave.errors import ConfigError
from inweave.files.images import write_png
from inweave.files.paths import exists, is_folder
from inweave.files.writing import make_folder
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.sheet import Sheet
from inweave.models import embedded
from inweave.training.config.schema import TrainConfig
from inweave.training.output.result import STOPPED
from inweave.training.session import train

#: by name, recolored, on a background, together: some the model was trained on, some it was not
BASE = (
    "red apple", "cat face", "rocket", "pizza", "octopus", "crown",
    "a blue cat face", "a purple pizza", "a green rocket", "red apple on a blue background", "cat face and dog face",
    "four butterflies",
)  # fmt: skip
SUBJECTS = ("cat face", "red apple", "mushroom", "crown", "a blue cat face")
STYLE, OTHER = "pixel", "ink"

Report = Callable[[str], None]  #: a line of text
Progress = Callable[[str, int, int], None]  #: activity, done, total


@dataclass(slots=True)
class Chapter:
    """One step, as shown on the page."""

    title: str
    text: str
    image: str
    commands: list[str]


@dataclass(slots=True)
class Story:
    """The contents of the page."""

    folder: Path
    chapters: list[Chapter] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    image_steps: int | None = None


def run(
    folder: Path,
    *,
    steps: int = 300,
    image_steps: int | None = None,
    report: Report = print,
    progress: Progress | None = None,
) -> Story:
    """Run the whole demo into ``folder``; ``image_steps`` below the model's default are for a quick look."""
    if exists(folder) and not is_folder(folder):
        raise ConfigError(f"{folder} is a file; the demo needs a folder to write to")
    make_folder(folder)
    started = time.perf_counter()
    pipe = pipeline(embedded.NAME)
    story = Story(folder, image_steps=image_steps)
    loaded = time.perf_counter()
    report(f"{embedded.NAME} loaded ({loaded - started:.1f} s, imports included)")
    _base(pipe, story, progress)
    generated = time.perf_counter()
    report(f"base.png: {len(BASE)} images, {(generated - loaded) / len(BASE):.2f} s each")
    style = _train(story, steps, progress)
    trained = time.perf_counter()
    report(f"{style.name}: {steps} steps in {trained - generated:.0f} s, {style.stat().st_size / 1e6:.2f} MB")
    _strengths(pipe, story, style, progress)
    report("strength.png: the same seeds at strength 0, 0.5 and 1")
    _stack(pipe, story, style, progress)
    report("stack.png: two LoRAs, each by itself and together")
    _edits(pipe, story, style, progress)
    report("edit.png: image to image and inpainting")
    story.facts = {
        "load": f"{loaded - started:.1f} s",
        "one image": f"{(generated - loaded) / len(BASE):.2f} s",
        "training": f"{steps} steps, {trained - generated:.0f} s",
        "total": f"{time.perf_counter() - started:.0f} s",
    }
    return story


def _generate(
    pipe: Pipeline, story: Story, prompt: str, seed: int, loras: tuple[tuple[str, float], ...] = (), **settings: Any
) -> Image.Image:
    choices = tuple(LoraChoice.parse(f"{where}:{strength:g}") for where, strength in loras)
    inputs = {name: settings.pop(name) for name in ("init", "mask") if name in settings}
    config = GenerateConfig(prompt=prompt, seed=seed, loras=choices, steps=story.image_steps, **settings)
    return pipe(config, **inputs).images[0]


def _base(pipe: Pipeline, story: Story, progress: Progress | None) -> None:
    images = []
    for number, prompt in enumerate(BASE):
        images.append(_generate(pipe, story, prompt, 7))
        _show(progress, "generating", number + 1, len(BASE))
    columns = 6
    rows = [images[i : i + columns] for i in range(0, len(images), columns)]
    captioned = [
        [_captioned(image, BASE[i * columns + j]) for j, image in enumerate(row)] for i, row in enumerate(rows)
    ]
    write_png(story.folder / "base.png", Sheet(captioned, [], []).render())
    story.chapters.append(
        Chapter(
            "What the model generates",
            "A Stable Diffusion model of 28 MB, trained on Noto emoji. The second row asks for colors, backgrounds and "
            "combinations that were not in its training data.",
            "base.png",
            [f'inweave generate "{prompt}" --seed 7' for prompt in BASE],
        )
    )


def _train(story: Story, steps: int, progress: Progress | None) -> Path:
    out = story.folder / "training"
    shutil.rmtree(out, ignore_errors=True)  # left by an earlier demo: training never overwrites a run
    config = TrainConfig.of(
        model=embedded.NAME, dataset=f"inweave/{STYLE}", output=str(out), name=STYLE, steps=steps, seed=1,
        cache_dir=str(out / "cache"),
    )  # fmt: skip

    def on_record(record: Mapping[str, Any]) -> None:
        if "loss" in record:
            _show(progress, "training", record["step"], record["total"])

    done = train(config, on_record=on_record, on_progress=progress)
    if done.reason == STOPPED:
        raise KeyboardInterrupt
    story.losses = done.losses
    images = style_set(STYLE)[1]
    columns = 8
    cells = [images[i : i + columns] for i in range(0, len(images) // columns * columns, columns)]
    write_png(story.folder / "training.png", Sheet(cells, [], []).render(72))
    folder = f"{story.folder.name}/training"
    story.chapters.append(
        Chapter(
            f"A style from {len(images)} images",
            f"Rank 8, {steps} steps with a batch size of 2, on the CPU. "
            "None of the subjects below is among the images.",
            "training.png",
            [
                f"inweave train --dataset inweave/{STYLE} --steps {steps} --seed 1 --name {STYLE} --output {folder}",
                f"inweave inspect {folder}/{done.path.name}",
            ],
        )
    )
    return done.path


def _strengths(pipe: Pipeline, story: Story, style: Path, progress: Progress | None) -> None:
    values = (0.0, 0.5, 1.0)
    cells = []
    for number, subject in enumerate(SUBJECTS):
        cells.append([_generate(pipe, story, subject, 11, ((str(style), value),)) for value in values])
        _show(progress, "strengths", number + 1, len(SUBJECTS))
    write_png(
        story.folder / "strength.png",
        Sheet(cells, [f"strength {value:g}" for value in values], list(SUBJECTS)).render(),
    )
    lora = _command_path(story, style)
    story.chapters.append(
        Chapter(
            "Before and after",
            "The same seed with the new LoRA at strength 0, 0.5 and 1. Strength 0 is the base model, bit for bit.",
            "strength.png",
            [f'inweave generate "{s}" --seed 11 --lora {lora} --grid strength=0,0.5,1' for s in SUBJECTS],
        )
    )


def _stack(pipe: Pipeline, story: Story, style: Path, progress: Progress | None) -> None:
    stacks: list[tuple[str, tuple[tuple[str, float], ...]]] = [
        ("base", ()),
        (f"{STYLE} 1", ((str(style), 1.0),)),
        (f"{OTHER} 1", ((OTHER, 1.0),)),
        (f"{STYLE} 0.6 + {OTHER} 0.3", ((str(style), 0.6), (OTHER, 0.3))),  # two at full strength wash out
    ]
    cells = []
    for number, subject in enumerate(SUBJECTS):
        cells.append([_generate(pipe, story, subject, 11, loras) for _, loras in stacks])
        _show(progress, "stacking", number + 1, len(SUBJECTS))
    write_png(story.folder / "stack.png", Sheet(cells, [name for name, _ in stacks], list(SUBJECTS)).render())
    lora = _command_path(story, style)
    story.chapters.append(
        Chapter(
            "Two LoRAs at once",
            f"The LoRA just trained and the bundled {OTHER}, each by itself and both together. Swapping takes "
            "milliseconds, and removing both restores the base weights bit for bit.",
            "stack.png",
            [f'inweave generate "{s}" --seed 11 --lora {lora}:0.6 --lora {OTHER}:0.3' for s in SUBJECTS],
        )
    )


def _edits(pipe: Pipeline, story: Story, style: Path, progress: Progress | None) -> None:
    start = _generate(pipe, story, "red apple", 7)
    write_png(story.folder / "apple.png", start)
    mask = Image.new("L", start.size, 0)
    ImageDraw.Draw(mask).rectangle((0, 64, 127, 127), fill=255)
    write_png(story.folder / "mask.png", mask)
    edits = [
        ("start", start),
        ("green apple, 0.6", _generate(pipe, story, "green apple", 3, init=start, strength=0.6)),
        (f"{STYLE}, 0.5", _generate(pipe, story, "red apple", 3, ((str(style), 1.0),), init=start, strength=0.5)),
        ("mask", mask.convert("RGB")),
        ("inpainted: pizza", _generate(pipe, story, "pizza", 5, init=start, mask=mask, strength=1.0, feather=12)),
    ]
    _show(progress, "editing", 1, 1)
    write_png(
        story.folder / "edit.png", Sheet([[image for _, image in edits]], [name for name, _ in edits], []).render()
    )
    start_file, mask_file = (f"{story.folder.name}/{name}.png" for name in ("apple", "mask"))
    lora = _command_path(story, style)
    story.chapters.append(
        Chapter(
            "Editing an image",
            "Image to image at strength 0.6 and, with the LoRA, at 0.5; and one half inpainted. Pixels where the mask "
            "is black do not change at all.",
            "edit.png",
            [
                f'inweave generate "red apple" --seed 7 -o {start_file}',
                f'inweave generate "green apple" --seed 3 --init {start_file} --strength 0.6',
                f'inweave generate "red apple" --seed 3 --init {start_file} --strength 0.5 --lora {lora}',
                f'inweave generate "pizza" --seed 5 --init {start_file} --mask {mask_file} --strength 1 --feather 12',
            ],
        )
    )


def _command_path(story: Story, path: Path) -> str:
    """Return the path of a demo file for a command line."""
    return f"{story.folder.name}/{path.relative_to(story.folder)}"


def _captioned(image: Image.Image, text: str) -> Image.Image:
    """Return an image with its caption below, wrapped to its width."""
    from inweave.generate.sheet import FAINT, PAPER, font

    paper = Image.new("RGB", (image.width, image.height + 30), PAPER)
    paper.paste(image, (0, 0))
    pen, words = ImageDraw.Draw(paper), text.split()
    small = font(11)
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if pen.textlength(longer, font=small) <= image.width - 6 else [*lines, word]
    for number, line in enumerate(lines[:2]):
        pen.text((image.width / 2, image.height + 3 + number * 13), line, fill=FAINT, font=small, anchor="mt")
    return paper


def _show(progress: Progress | None, activity: str, done: int, total: int) -> None:
    if progress is not None:
        progress(activity, done, total)
