"""Which requests are drawn together, what is merged and what is added, and what the results say of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inweave.adapter import Tensor
from inweave.errors import ConfigError
from inweave.formats.files import write_file
from inweave.generate import groups
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.result import Result
from tests.support import random

SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 3}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu")


def config(seed: int, *loras: Any, **settings: Any) -> GenerateConfig:
    return GenerateConfig(**{"prompt": "a cat", **SMALL} | settings, seed=seed, loras=list(loras))  # type: ignore[arg-type]


def assert_close(mine: Result, other: Result) -> None:
    for one, two in zip(mine.images, other.images, strict=True):
        apart = np.abs(np.asarray(one, int) - np.asarray(two, int))
        assert apart.max() <= 1 and (apart > 0).mean() < 0.01


def compare(pipe: Pipeline, configs: list[GenerateConfig], batch: Any = 8) -> list[Result]:
    """Each request alone and all in a list: the same images and records."""
    together = pipe(configs, batch=batch)
    for mine, each in zip(together, configs, strict=True):
        single = pipe(each, batch=1)
        assert_close(mine, single)
        assert mine.records == single.records
    return together


def module_of(pipe: Pipeline) -> tuple[str, tuple[int, ...]]:
    """A linear layer of the denoiser."""
    return next(
        (name.removesuffix(".weight"), tuple(weight.shape))
        for name, weight in pipe.model.denoiser.named_parameters()
        if name.endswith("to_q.weight")
    )


def dora(pipe: Pipeline, folder: Path) -> str:
    name, (out, into) = module_of(pipe)
    module = f"lora_unet_{name.replace('.', '_')}"
    weight = dict(pipe.model.denoiser.named_parameters())[f"{name}.weight"]
    norms = weight.detach().norm(dim=1, keepdim=True).numpy() * 1.5
    tensors = {
        f"{module}.lora_down.weight": random(1, 4, into), f"{module}.lora_up.weight": random(2, out, 4),
        f"{module}.dora_scale": Tensor("F32", (out, 1), norms.astype("<f4").tobytes()),
    }  # fmt: skip
    return str(write_file(folder / "strong.safetensors", tensors, {}))


def test_images_with_other_loras_share_a_batch(pipe: Pipeline) -> None:
    """LoRAs of the list, of tags in the prompt, at strengths of their own, and several images of one request."""
    configs = [
        config(1, "pixel:0.8"), config(2, "ink:1.0", guidance=2.0), config(3),
        config(4, "ink:0.5", prompt="a <lora:pixel:0.4> house", count=2), config(6, "pixel:0.3", guidance=1.0),
    ]  # fmt: skip
    results = compare(pipe, configs)
    assert [result.batches for result in results] == [[6], [6], [6], [6, 6], [6]]
    assert [result.added for result in results] == [["pixel"], ["ink"], [], ["ink", "pixel"], ["pixel"]]
    assert not any(result.merge_reason for result in results)


def test_what_all_have_is_merged() -> None:
    own = pipeline("inweave/emoji", device="cpu", loras=["pixel:0.5"])
    results = compare(own, [config(1), config(2, "ink:0.7"), config(3, "ink:-0.4")])
    assert [result.added for result in results] == [[], ["ink"], ["ink"]]
    assert own.model.weaver.woven  # type: ignore[union-attr]


def test_one_stack_is_merged(pipe: Pipeline) -> None:
    results = compare(pipe, [config(1, "pixel:0.8"), config(2, "pixel:0.8", prompt="a dog")])
    assert [(result.batches, result.added, result.merge_reason) for result in results] == [([2], [], "")] * 2


def test_what_cannot_be_added_is_merged(pipe: Pipeline, tmp_path: Path) -> None:
    """Two requests have the DoRA, so it is merged for both, and what they have besides is added."""
    strong = dora(pipe, tmp_path)
    results = compare(
        pipe, [config(1, "pixel:0.8"), config(2, strong, "ink:0.6"), config(3, "ink:1.0"), config(4, strong)]
    )
    assert [result.batches for result in results] == [[2]] * 4
    assert [result.added for result in results] == [["pixel"], ["ink"], ["ink"], []]
    (_, single) = compare(pipe, [config(1, "pixel:0.8"), config(2, strong)])
    assert (
        single.merge_reason.startswith("LoRA strong: ")
        and "DoRA is not a product of two factors" in single.merge_reason
    )
    assert single.batches == [1]


@pytest.mark.parametrize(
    ("settings", "batch", "reason"),
    [
        ({"width": 128}, 8, "no other request has its size, sampler and steps"),
        ({"steps": 4}, 8, "no other request has its size, sampler and steps"),
        ({}, 1, "images are made one by one"),
    ],
)
def test_requests_that_share_no_batch_are_merged(
    pipe: Pipeline, settings: dict[str, Any], batch: int, reason: str
) -> None:
    results = compare(pipe, [config(1, "pixel:0.8"), config(2, "ink:1.0", **settings)], batch)
    assert [(result.merge_reason, result.batches, result.added) for result in results] == [(reason, [1], [])] * 2


def test_auto_adds_where_it_costs_less(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [config(1, "pixel:0.8"), config(2, "ink:1.0"), config(3)]
    assert [result.batches for result in compare(pipe, small, "auto")] == [[3]] * 3
    large = [each.model_copy(update={"width": 256, "height": 256, "steps": 1}) for each in small]
    reason = "merging each stack costs less than adding it to the rows of a batch"
    assert {result.merge_reason for result in pipe(large, batch="auto")} == {reason}
    monkeypatch.setitem(groups._CALL, "cpu", 0.0)
    assert {result.merge_reason for result in pipe(small, batch="auto")} == {reason}


def test_more_loras_than_slots_take_several_batches(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_SLOTS", 1)
    results = compare(pipe, [config(1, "pixel:0.8"), config(2, "pixel:0.3"), config(3, "ink:1.0")])
    assert [result.batches for result in results] == [[2], [2], [1]]
    (_, both) = compare(pipe, [config(1), config(2, "pixel:0.3", "ink:0.2")])
    assert both.merge_reason == "it has more than 1 LoRAs"


def test_a_quantized_base_merges(tmp_path: Path) -> None:
    packed = pipeline("inweave/emoji", device="cpu", quantize="int8")
    results = packed([config(1, "pixel:0.8"), config(2, "ink:1.0"), config(3)], batch=8)
    assert all("the weight is quantized" in result.merge_reason for result in results[:2])
    assert [result.batches for result in results] == [[1]] * 3


def test_an_offloaded_base_merges() -> None:
    streamed = pipeline("inweave/emoji", device="cpu", offload="blocks")
    results = streamed([config(1, "pixel:0.8"), config(2, "ink:1.0")], batch=8)
    assert {result.merge_reason for result in results} == {"weights in host memory are merged there"}


def test_a_lora_that_does_not_fit_is_one_error(pipe: Pipeline, tmp_path: Path) -> None:
    wrong = write_file(tmp_path / "wrong.safetensors", {"lora_unet_x.lora_up.weight": random(1, 3, 2)}, {})
    with pytest.raises(ConfigError, match="request 1: "):
        pipe([config(1, "pixel:0.8"), config(2, str(wrong))], batch=8)
