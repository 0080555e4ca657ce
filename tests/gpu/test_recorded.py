"""Images whose steps are recorded in CUDA graphs are those of eager steps, whatever is swapped, batched or changed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from tests.peers import tiny_models  # noqa: E402

import inweave  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models import recorded as recording  # noqa: E402

RECORDED = ("sd1.5", "sd1.5-inpaint", "sd2.1", "sdxl", "sd3.5-medium", "flux1-dev", "flux2-klein-4b", "qwen-image")
SETTINGS: Mapping[str, Any] = {"steps": 4, "width": 64, "height": 64, "guidance": 4.0}


def pipe_of(variant: str, graph: Any = "auto", **more: Any) -> Pipeline:
    return inweave.pipeline(tiny_models.folder(variant), device="cuda", graph=graph, **{"dtype": "bf16", **more})


def pixels(pipe: Pipeline, prompt: str = "a red apple", **more: Any) -> np.ndarray[Any, Any]:
    result = pipe(prompt, **{**SETTINGS, "seed": 7, **more})
    return np.stack([np.asarray(image) for image in result.images])


@cache
def style(folder: Path, variant: str, seed: int) -> Path:
    return tiny_models.lora(folder / f"{variant}-{seed}.safetensors", variant, dialect="diffusers", seed=seed)


@pytest.mark.parametrize("variant", RECORDED)
def test_images_are_those_of_eager_steps(variant: str) -> None:
    pipe, eager = pipe_of(variant), pipe_of(variant, "off")
    assert eager.model.recorded is None
    for prompt, seed in (("a red apple", 1), ("a red apple", 2), ("two dogs in the snow, oil", 3)):
        assert np.array_equal(pixels(pipe, prompt, seed=seed), pixels(eager, prompt, seed=seed)), (prompt, seed)
    recorded = pipe.model.recorded
    assert recorded is not None and recorded.problem == "" and 1 <= len(recorded) <= 2
    assert recorded.bytes > 0 and recorded.seconds > 0


def test_sizes_and_batches_have_graphs_of_their_own() -> None:
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    changes: tuple[dict[str, Any], ...] = (
        {}, {"width": 96}, {"count": 3}, {"guidance": 1.0}, {"sampler": "dpmpp_2m"}, {"sampler": "plms"},
    )  # fmt: skip
    for more in changes:
        for seed in (1, 2):
            assert np.array_equal(pixels(pipe, seed=seed, **more), pixels(eager, seed=seed, **more)), more
    assert pipe.model.recorded is not None and len(pipe.model.recorded) == 4


def test_an_image_is_repainted() -> None:
    init = Image.new("RGB", (64, 64), "teal")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    for variant in ("sdxl", "sd1.5-inpaint"):
        pipe, eager = pipe_of(variant), pipe_of(variant, "off")
        for seed in (1, 2):
            more: dict[str, Any] = {"init": init, "mask": mask, "strength": 0.8, "seed": seed}
            assert np.array_equal(pixels(pipe, **more), pixels(eager, **more))


def test_swaps_keep_the_graphs(tmp_path: Path) -> None:
    pipe = pipe_of("sdxl")
    base = pixels(pipe)
    draw = random.Random(5)
    recorded = pipe.model.recorded
    assert recorded is not None
    pixels(pipe)
    seconds = recorded.seconds
    for _ in range(30):
        count = draw.randint(0, 3)
        stack = [f"{style(tmp_path, 'sdxl', draw.randint(0, 4))}:{draw.choice((0.3, 0.8, -0.5))}" for _ in range(count)]
        pipe.swap(list(dict.fromkeys(stack)))
    pixels(pipe)
    final = [f"{style(tmp_path, 'sdxl', 1)}:0.7", f"{style(tmp_path, 'sdxl', 3)}:0.4"]
    pipe.swap(final)
    woven = pixels(pipe)
    fresh = pipe_of("sdxl", "off")
    fresh.swap(final)
    assert np.array_equal(woven, pixels(fresh)) and not np.array_equal(woven, base)
    pipe.swap([])
    assert np.array_equal(pixels(pipe), base)
    assert recorded.seconds == seconds, "swaps write in place, so nothing was recorded again"


def test_a_changed_network_is_recorded_again() -> None:
    pipe = pipe_of("sdxl")
    base = pixels(pipe)
    handle = pipe.model.denoiser.conv_out.register_forward_hook(lambda layer, inputs, output: 0.9 * output)
    changed = pixels(pipe)
    assert not np.array_equal(changed, base)
    assert np.array_equal(changed, pixels(pipe))
    handle.remove()
    assert np.array_equal(pixels(pipe), base)


def test_adapters_beside_quantized_weights_are_followed(tmp_path: Path) -> None:
    pipe, eager = (pipe_of("sdxl", graph, quantize="int8") for graph in ("auto", "off"))
    for strength in ("0.8", "0.2", "-0.6"):
        for each in (pipe, eager):
            each.swap([f"{style(tmp_path, 'sdxl', 2)}:{strength}"])
        assert np.array_equal(pixels(pipe), pixels(eager)), strength


def test_what_cannot_be_recorded_runs_eagerly_and_says_why() -> None:
    pipe = pipe_of("sdxl")
    expected = pixels(pipe_of("sdxl", "off"))

    def read(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * bool(output.isfinite().all())

    pipe.model.denoiser.conv_out.register_forward_hook(read)
    result = pipe("a red apple", **{**SETTINGS, "seed": 7})
    assert any("not recorded in a CUDA graph" in warning for warning in result.warnings)
    assert np.array_equal(np.stack([np.asarray(image) for image in result.images]), expected)
    assert not any("CUDA graph" in warning for warning in pipe("a red apple", **{**SETTINGS, "seed": 8}).warnings)
    assert pipe.model.recorded is not None and len(pipe.model.recorded) == 0


def test_the_number_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST", 2)
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    for width in (64, 96, 128, 64, 96):
        assert np.array_equal(pixels(pipe, width=width), pixels(eager, width=width)), width
        assert pipe.model.recorded is not None and len(pipe.model.recorded) <= 2


def test_graphs_beyond_their_share_of_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SHARE", 1e-9)
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    for width in (64, 96, 64):
        assert np.array_equal(pixels(pipe, width=width), pixels(eager, width=width)), width
        assert pipe.model.recorded is not None and len(pipe.model.recorded) == 1


def test_a_cancelled_image_leaves_the_graphs_whole() -> None:
    pipe, eager = pipe_of("sdxl"), pipe_of("sdxl", "off")
    steps: list[int] = []

    def cancelled() -> bool:
        return len(steps) >= 2

    with pytest.raises(inweave.CancelledError):
        pipe("a red apple", **SETTINGS, progress=lambda at: steps.append(at.step), cancelled=cancelled)
    assert np.array_equal(pixels(pipe), pixels(eager))
