"""Convolutions with a LoRA as one operation on a real GPU: against float64, recorded in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from collections.abc import Callable, Iterator  # noqa: E402

from torch.nn import functional  # noqa: E402

from inweave.ops.linear import Rounded  # noqa: E402
from inweave.ops.linear.conv import Window, lora_conv2d  # noqa: E402

CUDA = torch.device("cuda")
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
#: channels in and out, side of the image, of the window, stride, rank: SDXL's resnets, samplers, shortcuts, odd sizes
CASES = [
    (320, 320, 64, 3, 1, 32), (640, 1280, 32, 3, 1, 16), (320, 320, 64, 3, 2, 8), (960, 320, 64, 1, 1, 32),
    (4, 320, 64, 3, 1, 4), (70, 35, 13, 3, 1, 3), (320, 640, 32, 3, 1, 256), (320, 320, 32, 3, 1, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def numbers(case: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """x, W, b, down, up, dY"""
    into, out, side, window, stride, rank = case
    generator = torch.Generator(CUDA).manual_seed(0)
    fan = into * window**2
    after = -(-side // stride)
    sizes = [
        ((2, into, side, side), 1.0), ((out, into, window, window), fan**-0.5), ((out,), 1.0),
        ((rank, into, window, window), fan**-0.5), ((out, rank, 1, 1), rank**-0.5), ((2, out, after, after), 1.0),
    ]  # fmt: skip
    tensors = [(torch.randn(size, generator=generator, device=CUDA) * std).to(dtype) for size, std in sizes]
    for at in (0, 1, 5):
        tensors[at] = tensors[at].contiguous(memory_format=torch.channels_last)
    return tensors


def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    window: Window,
) -> torch.Tensor:
    hidden = functional.conv2d(x, down, None, *window)
    return functional.conv2d(x, weight, bias, *window) + scale * functional.conv2d(hidden, up)


def gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], window: Window) -> list[torch.Tensor]:
    x, weight, bias, down, up, grad = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in (x, down, up)]
    y = function(leaves[0], weight, bias, leaves[1], leaves[2], 0.7, window)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def window_of(case: tuple[int, ...]) -> Window:
    return Window((case[4],) * 2, (case[3] // 2,) * 2, (1, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_gradients_repeat_their_bits_with_deterministic_kernels(
    case: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    tensors, window = numbers(case, dtype), window_of(case)
    first = gradients(lora_conv2d, tensors, window)
    for _ in range(5):
        assert all(map(torch.equal, first, gradients(lora_conv2d, tensors, window)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_plain_torch(case: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors, window = numbers(case, dtype), window_of(case)
    exact = gradients(plain, [tensor.double() for tensor in tensors], window)
    results = gradients(lora_conv2d, tensors, window), gradients(plain, tensors, window)
    for ours, theirs, right in zip(*results, exact, strict=True):
        room = torch.finfo(dtype).eps * right.norm()
        assert bool(ours.isfinite().all()) and (ours - right).norm() <= 2 * (theirs - right).norm() + room


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_a_recorded_operation_adds_to_the_same_buffers(case: tuple[int, ...]) -> None:
    x, weight, bias, down, up, grad = numbers(case, torch.bfloat16)
    factors = [down.float().requires_grad_(), up.float().requires_grad_()]
    totals = [torch.zeros_like(factor) for factor in factors]
    x.requires_grad_()

    def work() -> torch.Tensor:
        down_copy, up_copy = (
            Rounded(factor.detach().bfloat16(), total) for factor, total in zip(factors, totals, strict=True)
        )
        copies = {"rounded_down": down_copy, "rounded_up": up_copy}
        y = lora_conv2d(x, weight, bias, factors[0], factors[1], 0.7, window_of(case), **copies)
        return torch.autograd.grad(y, x, grad)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = work()
    torch.cuda.current_stream().wait_stream(stream)
    once = [total.clone() for total in totals]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    for total in totals:
        total.zero_()
    graph.replay()
    graph.replay()
    assert float((recorded - expected).norm()) <= 1e-2 * float(expected.norm())
    for total, one in zip(totals, once, strict=True):
        assert float((total - 2 * one).norm()) <= 1e-2 * float(one.norm()), "two replays add twice"
