"""Images that are made together are those that are made one by one, up to rounding, for every family and task.

Bound: a network's sums over rows of another shape are taken in another order, which moves values by about 1e-5 of their
range; so no pixel moves by more than one level of 256, and at most 1% of the values do. The noise of an image is the
same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from torch import Tensor

from inweave.generate import denoise as loop
from inweave.generate.denoise import Callbacks, decode_image, denoise
from inweave.generate.prepared import tasks_of
from inweave.models import samplers
from tests.peers import tiny_models as tiny
from tests.peers.test_families import (
    PROMPT,
    assert_other,
    assert_same,
    hole,
    ours,
    picture,
    requests,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The latents of every call of a denoiser."""
    seen: list[Tensor] = []
    call = loop.run_denoiser

    def record(model: Any, rows: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        seen.append(rows)
        return call(model, rows, t, inputs)

    monkeypatch.setattr(loop, "run_denoiser", record)
    return seen


def compare(variant: str, calls: list[Tensor], prompt: str = PROMPT, count: int = 2, **settings: Any) -> None:
    """Make images together, and each of them by itself."""
    pipe, mine = ours(variant), requests(variant)[0] | settings
    together = pipe(prompt, count=count, batch=count, **mine)
    assert together.batches == [count] * count
    rows, first = len(calls[0]) // count, calls[0]
    images = []
    for number in range(count):
        calls.clear()
        single = pipe(prompt, batch=1, **mine | {"seed": mine["seed"] + number})
        images.append(single.images[0])
        assert torch.equal(first[number * rows : (number + 1) * rows], calls[0]), "the noise of an image"
        assert_same(together.images[number], images[-1])
        assert together.records[number] == single.records[0]
    assert_other(images[0], images[1])


@pytest.mark.sample(8)
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_text_to_image(variant: str, calls: list[Tensor]) -> None:
    """Three in every family, of which one has neighbors on both sides; two show what is left, options of sampling."""
    compare(variant, calls, count=3)


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image"])
def test_image_to_image(variant: str, calls: list[Tensor]) -> None:
    compare(variant, calls, init=picture(), strength=0.6, steps=4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("variant", ["sd1.5", "sd1.5-inpaint", "sdxl-inpaint", "flux1-dev"])
def test_inpainting(variant: str, strength: float, calls: list[Tensor]) -> None:
    compare(variant, calls, init=picture(), mask=hole(), keep_unmasked=False, strength=strength, steps=4)


@pytest.mark.sample(8)
@pytest.mark.parametrize("sampler", samplers.offered_samplers())
def test_samplers(sampler: str, calls: list[Tensor]) -> None:
    compare("sd1.5", calls, sampler=sampler, steps=5)


@pytest.mark.parametrize("sampler", samplers.FLOW_SAMPLERS)
def test_flow_samplers(sampler: str, calls: list[Tensor]) -> None:
    compare("sd3-medium", calls, sampler=sampler, steps=5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", ["sd1.5", "sd3-medium", "qwen-image"])
@pytest.mark.parametrize("prompt", ["[a cat:a green pear on a table:0.4]", "a cat AND a dog :0.6", "[cat|dog]"])
def test_prompts_that_change_or_are_composed(variant: str, prompt: str, calls: list[Tensor]) -> None:
    compare(variant, calls, prompt, steps=4)


LONG = ", ".join(["a red apple on a wooden table"] * 14)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "variant",
    ["sd1.5", "sdxl", "sd3-medium", "flux1-dev", "flux2-klein-base-4b", "z-image-turbo", "z-image", "qwen-image"],
)
def test_images_of_different_requests(variant: str) -> None:
    """Prompts of different lengths, guidances, seeds and starting images in one batch."""
    pipe, mine = ours(variant), requests(variant)[0]
    negative = {"negative_prompt": "dark, a much longer text than the other one"} if "negative_prompt" in mine else {}
    each = [
        mine | {"prompt": PROMPT},
        mine | {"prompt": LONG, "seed": 11},
        mine | {"prompt": "a pear", "seed": 12, "guidance": mine["guidance"] and mine["guidance"] + 1.5} | negative,
    ]
    starts = [picture(1), picture(1), picture(2)]
    for inits in ([None] * 3, starts):
        tasks, single = [], []
        for settings, init in zip(each, inits, strict=True):
            request = pipe.prepare(loop_config(settings), init=init)
            tasks += tasks_of(request, pipe._conditioning(request))
            single.append(pipe(**settings, init=init).images[0])
        latents = denoise(pipe.model, tasks, Callbacks())
        for number, task in enumerate(tasks):
            assert_same(decode_image(pipe.model, latents[number : number + 1], task, Callbacks()), single[number])
        assert_other(single[0], single[2])


def loop_config(settings: dict[str, Any]) -> Any:
    from inweave.generate.config import GenerateConfig

    return GenerateConfig(**settings)


def test_images_with_and_without_guidance_take_a_call_each(calls: list[Tensor]) -> None:
    pipe, mine = ours("sd1.5"), requests("sd1.5")[0] | {"prompt": PROMPT}
    tasks = []
    for guidance in (5.0, 1.0, 3.0):
        request = pipe.prepare(loop_config(mine | {"guidance": guidance}))
        tasks += tasks_of(request, pipe._conditioning(request))
    latents = denoise(pipe.model, tasks, Callbacks())
    assert [len(rows) for rows in calls[:2]] == [4, 1]
    for number, guidance in enumerate((5.0, 1.0, 3.0)):
        single = pipe(**mine | {"guidance": guidance}).images[0]
        assert_same(decode_image(pipe.model, latents[number : number + 1], tasks[number], Callbacks()), single)


def test_a_value_that_is_not_finite_stays_in_its_image() -> None:
    pipe, mine = ours("sd1.5"), requests("sd1.5")[0] | {"prompt": PROMPT}
    request = pipe.prepare(loop_config(mine | {"count": 3}), init=picture())
    tasks = tasks_of(request, pipe._conditioning(request))
    broken = torch.full_like(tasks[0].init, float("nan"))  # type: ignore[arg-type]
    good = denoise(pipe.model, tasks, Callbacks())
    latents = denoise(pipe.model, [tasks[0], replace(tasks[1], init=broken), tasks[2]], Callbacks())
    assert torch.equal(good[[0, 2]], latents[[0, 2]]) and not bool(torch.isfinite(latents[1]).any())
