"""How many images are made together, and what a request sees of it: progress, previews, cancellation, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inweave.errors import CancelledError, ConfigError, RequestError
from inweave.generate import drawing
from inweave.generate.batches import check_batch, largest_batch, split
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Progress, denoise
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.prepared import tasks_of

SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 4, "seed": 1}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu")


@pytest.mark.parametrize(
    ("count", "most", "sizes"), [(1, 4, [1]), (4, 4, [4]), (5, 4, [2, 3]), (9, 4, [3, 3, 3]), (3, 1, [1, 1, 1])]
)
def test_a_request_is_split_evenly(count: int, most: int, sizes: list[int]) -> None:
    parts = split(count, most)
    assert [len(part) for part in parts] == sizes
    assert [number for part in parts for number in part] == list(range(count))


@pytest.mark.parametrize("batch", [0, 101, -1, True, 1.5, "many", "", None, "1.5"])
def test_other_batches_are_refused(batch: Any, pipe: Pipeline) -> None:
    with pytest.raises(ConfigError, match="batch: expected auto or a number of images, 1 to 100"):
        check_batch(batch)
    with pytest.raises(ConfigError, match="batch"):
        pipeline("inweave/emoji", batch=batch)


def test_a_batch_may_be_a_text() -> None:
    assert (check_batch("4"), check_batch(4), check_batch("auto")) == (4, 4, "auto")


@pytest.mark.parametrize(("side", "most"), [(64, 8), (128, 4), (192, 1), (512, 1)])
def test_a_cpu_makes_small_images_together(side: int, most: int, pipe: Pipeline) -> None:
    request = pipe.prepare(GenerateConfig(prompt="cat", width=side, height=side, count=16))
    tasks = tasks_of(request, pipe._conditioning(request))
    assert largest_batch(pipe.model, tasks, "auto", {}) == most
    assert largest_batch(pipe.model, tasks, 16, {}) == 16
    assert largest_batch(pipe.model, tasks[:1], 16, {}) == 1


def test_a_batch_of_a_call_goes_before_that_of_the_pipeline() -> None:
    small = pipeline("inweave/emoji", device="cpu", batch=2)
    assert small("cat", count=3, **SMALL).batches == [1, 2]
    assert small("cat", count=3, batch="auto", **SMALL).batches == [3]


def test_progress_and_previews_of_a_batch(pipe: Pipeline) -> None:
    reports: list[Progress] = []
    made: list[int] = []
    pipe(
        "cat face", progress=reports.append, preview_every=2, count=5, batch=3,
        on_image=lambda number, image, record: made.append(number), **SMALL,
    )  # fmt: skip
    assert made == [0, 1, 2, 3, 4]
    first, second = [at for at in reports if at.batch == 2], [at for at in reports if at.batch == 3]
    assert [*first, *second] == reports
    assert [(at.step, at.image, at.position) for at in first] == [(1, 0, 0), (2, 0, 0), (2, 1, 1), (3, 0, 0), (4, 0, 0)]
    assert [at.image for at in second] == [2, 2, 3, 4, 2, 2]
    assert [at.done for at in reports] == [2, 4, 4, 6, 8, 11, 14, 14, 14, 17, 20]
    assert {at.work for at in reports} == {20}
    previews = [at.preview for at in second if at.preview is not None]
    assert len({preview.tobytes() for preview in previews}) == 3


def test_a_preview_is_that_of_its_image(pipe: Pipeline) -> None:
    together, single = dict[int, Image.Image](), dict[int, Image.Image]()

    def keep(previews: dict[int, Image.Image], at: Progress) -> None:
        if at.preview is not None:
            previews[at.image] = at.preview

    for previews, batch in ((together, 2), (single, 1)):
        pipe("cat", count=2, batch=batch, progress=lambda at, p=previews: keep(p, at), preview_every=2, **SMALL)  # type: ignore[misc]
    for number in (0, 1):
        apart = np.asarray(together[number], np.int16) - np.asarray(single[number], np.int16)
        assert np.abs(apart).max() <= 1
    assert together[0].tobytes() != together[1].tobytes()


def test_cancellation_stops_a_batch(pipe: Pipeline) -> None:
    steps: list[int] = []
    with pytest.raises(CancelledError):
        pipe("cat", progress=lambda at: steps.append(at.step), cancelled=lambda: len(steps) == 2, count=4, **SMALL)
    assert steps == [1, 2]


def test_a_batch_that_does_not_fit_is_made_in_halves(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def short(model: Any, tasks: Any, *arguments: Any) -> Any:
        sizes.append(len(tasks))
        if len(tasks) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return denoise(model, tasks, *arguments)

    expected = pipe("cat", count=5, batch=1, **SMALL)
    monkeypatch.setattr(drawing, "denoise", short)
    result = pipe("cat", count=5, batch=5, **SMALL)
    assert sizes == [5, 2, 3, 1, 2] and result.batches == [2, 1, 2]
    assert [record["config"]["seed"] for record in result.records] == [1, 2, 3, 4, 5]
    for image, other in zip(result.images, expected.images, strict=True):
        assert np.abs(np.asarray(image, np.int16) - np.asarray(other, np.int16)).max() <= 1
    assert "not enough memory for 5 images together; they were made in smaller batches" in result.warnings


def test_images_before_one_that_fails_are_delivered(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def broken(*arguments: Any) -> torch.Tensor:
        latents = denoise(*arguments)
        latents[2] = float("nan")
        return latents

    monkeypatch.setattr(drawing, "denoise", broken)
    with pytest.raises(RequestError, match="the denoiser gave numbers that are not finite"):
        pipe("cat", count=4, batch=4, on_image=lambda number, *rest: made.append(number), **SMALL)
    assert made == [0, 1]
