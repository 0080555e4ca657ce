"""The bars of the embedded model: each measure must tell what is right from what is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageDraw

from inweave.bench import bars
from inweave.bench.adapter_bars import identity, unseen_subjects, write_creature
from inweave.bench.bars import Bar, seam_ratio, shapes, strongest_hue
from inweave.bench.creature import CONTEXTS, TRIGGER, drawings
from inweave.bench.embedded import reference
from inweave.bench.judge import Judge, descriptor, load_judge
from inweave.bench.measure_bars import measure_bars
from inweave.errors import ConfigError


@pytest.fixture(scope="module")
def referee() -> Judge:
    return load_judge()


def disks(*places: tuple[int, int], color: str = "black", ground: str = "white", radius: int = 14) -> Image.Image:
    image = Image.new("RGB", (128, 128), ground)
    for x, y in places:
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image


@pytest.mark.parametrize(
    ("color", "name"),
    [("#dc2121", "red"), ("#f0c020", "yellow"), ("#33a840", "green"), ("#2166e0", "blue"), ("#8a38c2", "purple")],
)
def test_the_strongest_hue_is_named(color: str, name: str) -> None:
    assert strongest_hue(disks((40, 40), (90, 90), color=color)) == name
    assert strongest_hue(disks((40, 40), color="gray")) is None


def test_shapes_are_counted_without_specks_and_on_any_ground() -> None:
    assert shapes(disks((30, 30), (95, 30), (64, 95))) == 3
    assert shapes(disks((30, 30), (95, 30), color="yellow", ground="blue")) == 2
    speckled = disks((64, 64), radius=30)
    speckled.putpixel((5, 5), (0, 0, 0))
    assert shapes(speckled) == 1 and shapes(Image.new("RGB", (64, 64))) == 0


def test_a_seam_is_a_step_at_the_border_of_the_mask_alone() -> None:
    values = np.add.outer(np.arange(128), np.arange(128)).astype(np.uint8)
    smooth = Image.fromarray(np.repeat(values[..., None], 3, -1))
    mask = Image.new("L", (128, 128))
    mask.paste(255, (0, 64, 128, 128))
    assert seam_ratio(smooth, mask) == pytest.approx(1, abs=0.05)
    cut = smooth.copy()
    cut.paste((250, 250, 250), (0, 64, 128, 128))
    assert seam_ratio(cut, mask) > 20
    inside = smooth.copy()  # a step away from the border is none
    inside.paste((250, 250, 250), (0, 90, 128, 128))
    assert seam_ratio(inside, mask) == pytest.approx(1, abs=0.05)


def test_a_descriptor_does_not_depend_on_place_size_and_ground() -> None:
    image, _ = drawings()[0]
    small = Image.new("RGB", (128, 128), "white")
    small.paste(image.resize((64, 64), Image.Resampling.BOX), (20, 50))
    one, two, other = descriptor(image), descriptor(small), descriptor(disks((64, 64), radius=40))
    assert np.linalg.norm(one - two) < 0.35 * np.linalg.norm(one - other)
    assert np.isfinite(descriptor(Image.new("RGB", (16, 16), "white"))).all()


def test_the_judge_knows_the_drawings_of_the_reference_sheet(referee: Judge) -> None:
    known = [(name, image) for name, image in zip(*reference(), strict=True) if name in referee.subjects]
    names, images = [name for name, _ in known], [image for _, image in known]
    assert len(known) > 100 and referee.right(images, names, 5) > 0.8  # thumbnails of 32 pixels
    assert referee.right(images[::-1], names, 5) < 0.1
    assert all(referee.facts["right"][name] > 0.3 for name in ("openmoji", "emojione"))
    with pytest.raises(ConfigError, match="does not know 'nobody'"):
        referee.number("nobody")


def test_unseen_subjects_are_none_of_the_captions(referee: Judge) -> None:
    names = unseen_subjects(referee, ["fox"], 48, "openmoji")
    assert len({*names}) == 48 and "fox" not in names


class PerfectDraw:
    """Draws the creature where it is asked for with an adapter, and otherwise a disk whose place is the subject's."""

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], *, loras: Sequence[str] = (),
        init: Image.Image | None = None, mask: Image.Image | None = None,
    ) -> list[Image.Image]:  # fmt: skip
        creature = drawings()[0][0]
        plain = [disks((20 + len(prompt) * 3 % 90, 64)) for prompt in prompts]
        return [
            creature if loras and TRIGGER in prompt else image for prompt, image in zip(prompts, plain, strict=True)
        ]


def test_identity_finds_the_creature_and_drift_its_absence(referee: Judge) -> None:
    answers, drift = identity(PerfectDraw(), referee, "any")
    assert answers.value == 1 and answers.is_met and "without the adapter 0.00" in answers.detail
    assert drift.value == 0 and drift.is_met
    assert len(CONTEXTS) == 10 and not {*CONTEXTS} & {caption for _, caption in drawings()}


def test_seeds_that_change_nothing_miss_the_bar(referee: Judge) -> None:
    row = bars.seeds(PerfectDraw(), referee, 4)
    assert row.value == 0 and not row.is_met and row.as_dict()["met"] is False


def test_a_bar_may_be_an_upper_limit() -> None:
    assert Bar("seams", 1.1, 1.2, at_most=True).is_met and not Bar("seams", 1.3, 1.2, at_most=True).is_met


def test_the_creature_is_a_dataset(tmp_path: object) -> None:
    folder = write_creature(tmp_path / "creature")  # type: ignore[operator]
    assert len(list(folder.glob("*.png"))) == len(list(folder.glob("*.txt"))) == 6
    assert all(TRIGGER in path.read_text() for path in folder.glob("*.txt"))


def test_unknown_bars_and_a_missing_folder_are_named() -> None:
    pipe: object = None
    with pytest.raises(ConfigError, match="no bar is called 'hands'; known are subjects"):
        measure_bars(pipe, ["hands"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs --held-out FOLDER"):
        measure_bars(pipe, ["style"])  # type: ignore[arg-type]
