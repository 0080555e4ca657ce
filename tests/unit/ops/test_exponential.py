"""The exponential of kernels against float64, in Triton's interpreter; and where kernels are launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import inweave.ops  # noqa: E402
from inweave.ops.common.exponential import exact_exp  # noqa: E402
from tests.unit.ops.interpreter import run_interpreted  # noqa: E402


@triton.jit  # type: ignore[untyped-decorator]
def kernel(x: Any, y: Any, SIZE: tl.constexpr) -> None:
    places = tl.arange(0, SIZE)
    tl.store(y + places, exact_exp(tl.load(x + places)))


def interpreted() -> tuple[float, list[str]]:
    """Return the largest error in units in the last place, and results of special numbers, in a separate process."""
    x = torch.linspace(-87.0, 88.0, 4096)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, SIZE=4096)
    truth = x.double().exp()
    unit = truth * torch.finfo(torch.float32).eps
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 200.0, -200.0, 89.0, -110.0])
    results = torch.empty_like(special)
    kernel[(1,)](special, results, SIZE=8)
    return float(((y.double() - truth) / unit).abs().max()), [str(float(each)) for each in results]


def test_exp_has_the_error_of_one_rounding_or_two() -> None:
    error, special = run_interpreted(__name__)
    assert error < 1.5
    assert special == ["inf", "0.0", "nan", "1.0", "inf", "0.0", "inf", "0.0"]


def test_every_kernel_is_launched_on_the_device_of_its_tensors() -> None:
    """Triton launches on the current device, which need not be that of the tensors: such a kernel faults, or worse."""
    packages = [path.parent for path in Path(inweave.ops.__file__).parent.glob("*/triton.py")]
    assert len(packages) >= 7
    for package in packages:
        texts = [path.read_text(encoding="utf-8") for path in package.glob("*.py")]
        assert any("with on_device_of(" in text for text in texts), f"{package.name} launches on the current device"
