"""Images on a GPU: those of the CPU in float32, with LoRAs woven in, and close to them in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import numpy as np  # noqa: E402

import inweave  # noqa: E402


def generated(device: str, dtype: str, **more: Any) -> np.ndarray[Any, Any]:
    pipe = inweave.pipeline("inweave/emoji", device=device, dtype=dtype)
    result = pipe("a red apple", seed=7, steps=8, **more)
    return np.asarray(result.images[0], dtype=np.float32)


@pytest.mark.parametrize("loras", [[], ["pixel:0.8", "ink:0.4"]])
def test_an_image_equals_the_cpus(loras: list[str]) -> None:
    on_cpu = generated("cpu", "fp32", loras=loras)
    assert np.abs(generated("cuda", "fp32", loras=loras) - on_cpu).mean() < 1.0
    assert np.abs(generated("cuda", "bf16", loras=loras) - on_cpu).mean() < 12.0
