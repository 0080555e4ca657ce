"""How many images are made together, and what a request sees of it: progress, previews, cancellation, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from inweave.errors import CancelledError, ConfigError, RequestError
from inweave.generate import drawing
from inweave.generate.axes import Axis
from inweave.generate.batches import check_batch, largest_batch, split
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Progress, denoise
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.prepared import tasks_of
from inweave.generate.sweep import sweep

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
    assert small("cat", count=3, **SMALL).batches == [1, 2, 2]
    assert small("cat", count=3, batch="auto", **SMALL).batches == [3, 3, 3]


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
    assert [(at.step, at.image) for at in first] == [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]
    assert {at.finished for at in first} == {0} and {at.finished for at in second} == {2}
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
    assert sizes == [5, 3, 2, 1, 2] and result.batches == [2, 2, 1, 2, 2]
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


def levels(image: Image.Image, other: Image.Image) -> int:
    """Return the largest difference of two images, in levels of 256."""
    return int(np.abs(np.asarray(image, np.int16) - np.asarray(other, np.int16)).max())


def test_cells_of_a_sheet_that_share_their_settings_are_made_together(pipe: Pipeline) -> None:
    config = GenerateConfig(prompt="cat", **SMALL)
    made = sweep(pipe, config, [Axis("seed", (1, 2, 3)), Axis("guidance", (2.0, 5.0))], batch=6)
    cells = [result for row in made.results for result in row]
    assert [cell.batches for cell in cells] == [[6]] * 6
    for cell in cells:
        settings = cell.records[0]["config"]
        single = pipe(GenerateConfig(prompt="cat", **SMALL | {k: settings[k] for k in ("seed", "guidance")}))
        assert levels(cell.images[0], single.images[0]) <= 1 and cell.records == single.records
    assert levels(cells[0].images[0], cells[4].images[0]) > 8, "another guidance is another image"
    steps = sweep(pipe, config, [Axis("steps", (2, 3)), Axis("seed", (1, 2))], batch=6)
    assert [cell.batches for row in steps.results for cell in row] == [[2]] * 4
    stacks = GenerateConfig(prompt="cat", loras=["pixel:0.8"], **SMALL)  # type: ignore[arg-type]
    strengths = sweep(pipe, stacks, [Axis("strength", (0.0, 1.0)), Axis("seed", (1, 2))], batch=6)
    assert [cell.batches for row in strengths.results for cell in row] == [[4]] * 4


def test_several_requests_share_batches(pipe: Pipeline) -> None:
    requests = [
        GenerateConfig(prompt="cat", count=2, **SMALL),
        GenerateConfig(prompt="a very red apple", loras=["pixel:0.8"], **SMALL),  # type: ignore[arg-type]
        GenerateConfig(prompt="[rocket:pizza:2]", negative_prompt="a dog", guidance=4.0, **SMALL),
    ]
    made: list[int] = []
    results = pipe(requests, batch=8, on_image=lambda number, *rest: made.append(number))
    assert sorted(made) == [0, 1, 2, 3]
    assert [result.batches for result in results] == [[4, 4], [4], [4]]
    for request, result in zip(requests, results, strict=True):
        single = pipe(request, batch=1)
        assert result.records == single.records and len(result.loras) == len(single.loras)
        assert result.warnings == single.warnings
        for image, other in zip(result.images, single.images, strict=True):
            assert levels(image, other) <= 1


def test_problems_of_several_requests_are_one_error(pipe: Pipeline) -> None:
    good = GenerateConfig(prompt="cat", **SMALL)
    wrong = GenerateConfig(prompt="cat", loras=["gone"], init="/gone.png", **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        pipe([good, wrong, wrong])
    assert [str(problem)[:10] for problem in caught.value.problems] == ["request 1:"] * 2 + ["request 2:"] * 2
    with pytest.raises(ConfigError, match="steps: set these in the configurations"):
        pipe([good], steps=3)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="request 0: expected a GenerateConfig, got dict"):
        pipe([{"prompt": "cat"}])  # type: ignore[list-item]
    assert pipe([]) == []


def test_a_request_that_fails_leaves_the_others(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(model: Any, tasks: Any, *arguments: Any) -> torch.Tensor:
        latents = denoise(model, tasks, *arguments)
        latents[[number for number, task in enumerate(tasks) if task.seed == 8]] = float("nan")
        return latents

    monkeypatch.setattr(drawing, "denoise", broken)
    settings = {name: value for name, value in SMALL.items() if name != "seed"}
    requests = [
        GenerateConfig(prompt="cat", seed=seed, count=count, **settings) for seed, count in ((1, 1), (7, 3), (3, 2))
    ]
    for batch in (1, 2, 8):
        results = pipe(requests, batch=batch)
        assert [len(result.images) for result in results] == [1, 1, 2]
        assert results[0].error is None and results[2].error is None
        with pytest.raises(RequestError, match="not finite"):
            results[1].save(tmp_path / "a.png", 1)
        results[1].save(tmp_path / f"b{batch}.png", 0)
    with pytest.raises(RequestError, match="not finite"):
        pipe(requests[1])
    with pytest.raises(RequestError, match="not finite"):
        sweep(pipe, requests[0], [Axis("seed", (7, 8))])
