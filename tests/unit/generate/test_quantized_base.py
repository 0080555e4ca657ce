"""Images of a quantized denoiser: near those of the original, with LoRAs swapped on it, and a record that says so."""

from __future__ import annotations

from typing import Any, get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import numpy as np
import torch

import inweave
from inweave.errors import ConfigError
from inweave.generate.pipeline import Pipeline
from inweave.models.model import Quantize
from inweave.ops.quantized import FORMATS
from inweave.serve.engine.contract import RunnerSettings
from inweave.serve.engine.runner import Runner
from inweave.serve.settings import ServeSettings

LORA = "pixel"
#: mean and largest difference of 8-bit colors after 4 steps; measured 0.38 and 23, 0.33 and 16, 2.3 and 77
BOUNDS = {"int8": (0.8, 48), "int8-hadamard": (0.8, 48), "nf4": (5.0, 160)}


def image_of(pipe: Pipeline, **settings: Any) -> np.ndarray[Any, Any]:
    return np.asarray(pipe("a red apple", seed=7, steps=4, **settings).images[0]).astype(float)


@pytest.fixture(scope="module")
def plain() -> Any:
    pipe = inweave.pipeline("inweave/emoji", device="cpu")
    return image_of(pipe), image_of(pipe, loras=[f"{LORA}:1.0"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", BOUNDS)
def test_images_are_near_those_of_the_original(format: Any, plain: Any) -> None:
    pipe = inweave.pipeline("inweave/emoji", device="cpu", quantize=format)
    assert f"are stored in {format}" in pipe.model.quantization and "MiB instead of" in pipe.model.quantization
    stored = {name: tensor.clone() for name, tensor in pipe.model.denoiser.named_buffers()}
    mean, largest = BOUNDS[format]
    first = image_of(pipe)
    for loras, expected in (([], plain[0]), ([f"{LORA}:1.0"], plain[1])):
        result = pipe("a red apple", seed=7, steps=4, loras=loras)
        assert result.records[0]["model"]["quantize"] == format
        difference = np.abs(np.asarray(result.images[0]).astype(float) - expected)
        assert 0 < difference.mean() < mean * (1 + 3 * bool(loras)), (loras, difference.mean(), difference.max())
        assert loras or difference.max() < largest  # pixel art has edges that may move
        assert bool(pipe.model.rounding_loss) is bool(loras)
    assert np.array_equal(image_of(pipe), first), "LoRAs leave the stored bytes as they were"
    assert all(torch.equal(tensor, stored[name]) for name, tensor in pipe.model.denoiser.named_buffers())
    own = inweave.pipeline("inweave/emoji", device="cpu", quantize=format, loras=[f"{LORA}:1.0"])
    assert np.array_equal(image_of(own), np.asarray(result.images[0]).astype(float)), "merged while loading"


def test_what_a_device_or_a_model_cannot_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="8-bit products need an NVIDIA GPU"):
        inweave.pipeline("inweave/emoji", device="cpu", quantize="fp8")
    with pytest.raises(ConfigError, match=r"expected off, keep, fp8, .*nf4-hadamard, got 'int7'"):
        inweave.pipeline("inweave/emoji", device="cpu", quantize="int7")  # type: ignore[arg-type]
    assert set(get_args(Quantize)) == {"off", "keep", *FORMATS}
    assert set(get_args(ServeSettings.model_fields["quantize"].annotation)) == set(get_args(Quantize))


def test_a_worker_holds_its_models_in_the_format() -> None:
    runner = Runner(RunnerSettings(device="cpu", quantize="int8"))
    assert runner.load("inweave/emoji").model.quantized == "int8"
