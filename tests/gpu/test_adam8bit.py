"""8-bit AdamW on a real GPU: the kernel against the reference, and whole steps captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from torch import nn  # noqa: E402

from inweave.ops.adam8bit import code_book, corrections, dequantize, fresh, reference  # noqa: E402
from inweave.ops.adam8bit import triton as kernel  # noqa: E402
from inweave.training.optim.adamw import make_optimizer  # noqa: E402
from inweave.training.optim.ema import Ema  # noqa: E402
from inweave.training.optim.flat import FlatParameters  # noqa: E402
from inweave.training.optim.loss_scale import LossScaler, clip  # noqa: E402

CUDA = torch.device("cuda")
EPS = torch.finfo(torch.float32).eps


def wide(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    sizes = 10 ** (torch.rand(size, generator=generator, device=CUDA) * 8 - 6)
    return torch.randn(size, generator=generator, device=CUDA) * sizes


def options(count: int, lr: torch.Tensor, ok: torch.Tensor) -> dict[str, Any]:
    return {
        "lr": lr, "ok": ok, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1,
        "grad_scale": torch.tensor(0.7, device=CUDA),
        "inverse": corrections(torch.tensor(count, device=CUDA), 0.9, 0.999),
    }  # fmt: skip


def gaps(codes: torch.Tensor, signed: bool) -> torch.Tensor:
    """The wider of the two distances to a code's neighbors."""
    steps = code_book(signed, CUDA).diff()
    return torch.maximum(steps[codes.int().clamp_max(254)], steps[(codes.int() - 1).clamp_min(0)])


@pytest.mark.parametrize("size", [1, 255, 257, 4096, 1_000_003, 50_000_000])
def test_kernel_equals_the_reference(size: int) -> None:
    plain = [wide(size, 0), *fresh(size, CUDA)]
    for count in range(1, 6):
        ours = [tensor.clone() for tensor in plain]  # from the same bits at every step
        blocks = -(-size // 256)
        lr = torch.rand(blocks if count % 2 else (), device=CUDA) * 1e-2
        chosen, grads = options(count, lr, torch.tensor(True, device=CUDA)), wide(size, count)
        # a first moment may cancel, its error does not
        summands = plain[2].abs() + reference._blocks(grads).abs().amax(1)
        reference.step(plain[0], grads, *plain[1:], **chosen)
        kernel.step(ours[0], grads, *ours[1:], **chosen)
        # rounding of x, and of a step of some lr; sums may be fused
        assert bool(((ours[0] - plain[0]).abs() <= EPS * (2 * plain[0].abs() + 256 * 1e-2)).all())
        for at, signed in ((1, True), (3, False)):
            off = (ours[at + 1].abs() - plain[at + 1].abs()).abs()
            assert bool((off <= 4 * EPS * (summands if signed else plain[at + 1])).all())
            one, two = (dequantize(each[at], each[at + 1], signed=signed) for each in (ours, plain))
            scale = plain[at + 1].abs().repeat_interleave(256)[:size]
            assert bool(((one - two).abs() <= 1.01 * gaps(plain[at], signed) * scale).all()), "at most one code"
            differing = int((ours[at] != plain[at]).sum())
            # a block whose largest values of both signs are equal but for rounding may take the other sign
            assert differing <= 1e-4 * size + 256, differing


@pytest.mark.parametrize("rows,warps,coarse", [(1, 1, 0), (2, 2, 4), (8, 8, 3), (16, 4, 2)])
def test_the_shape_of_the_launch_changes_no_bit(rows: int, warps: int, coarse: int) -> None:
    one, two = ([wide(100_001, 0), *fresh(100_001, CUDA)] for _ in range(2))
    for count in range(1, 4):
        chosen = options(count, torch.tensor(1e-2, device=CUDA), torch.tensor(1.0, device=CUDA))
        grads = wide(100_001, count)
        kernel.step(one[0], grads, *one[1:], **chosen)
        kernel.step(two[0], grads, *two[1:], **chosen, rows=rows, warps=warps, coarse=coarse)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_not_ok_changes_no_bit(dtype: torch.dtype) -> None:
    state = [wide(5000, 0), *fresh(5000, CUDA)]
    kernel.step(
        state[0], wide(5000, 1), *state[1:], **options(1, torch.tensor(1e-2, device=CUDA), torch.ones((), device=CUDA))
    )
    before = [tensor.clone() for tensor in state]
    chosen = options(2, torch.tensor(1e-2, device=CUDA), torch.zeros((), dtype=dtype, device=CUDA))
    kernel.step(state[0], torch.full((5000,), float("nan"), device=CUDA), *state[1:], **chosen)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


class Run:
    """Everything of a step that follows the backward pass."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator(CUDA).manual_seed(0)
        shapes = {"a": (640, 32), "b": (32, 1280), "c": (77,)}
        parameters = {n: nn.Parameter(torch.randn(s, generator=generator, device=CUDA)) for n, s in shapes.items()}
        self.flat = FlatParameters(parameters, {"b": 16.0})
        self.optimizer = make_optimizer(name, self.flat, weight_decay=0.1)
        self.ema, self.scaler = Ema(self.flat, 0.99), LossScaler(CUDA, interval=2)
        self.lr = torch.tensor(1e-3, device=CUDA)

    def step(self) -> None:
        grad_scale, ok, _ = clip(self.flat.grads, 1.0, self.scaler.scale)
        self.optimizer.step(self.lr, grad_scale, ok)
        self.scaler.update(ok)
        self.ema.update(ok)

    def tensors(self) -> list[torch.Tensor]:
        states = (self.optimizer.state(), self.ema.state(), self.scaler.state())
        return [self.flat.values, *(tensor for state in states for tensor in state.values())]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_a_captured_step_is_the_step(name: str) -> None:
    plain, captured = Run(name), Run(name)
    for run in (plain, captured):
        run.flat.grads.copy_(wide(run.flat.grads.numel(), 1))
        run.step()  # compiles, and makes the constants
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for count in range(2, 12):
        for run in (plain, captured):
            run.flat.grads.copy_(wide(run.flat.grads.numel(), count))
            run.lr.fill_(1e-3 / count)
            if count % 4 == 0:
                run.flat.grads[3] = float("inf")
        plain.step()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(plain.tensors(), captured.tensors(), strict=True)), count
    assert int(captured.scaler.skipped) == 2
    assert bool(captured.flat.values.isfinite().all())
