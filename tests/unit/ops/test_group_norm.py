"""Normalization: references and Triton's kernels against float64, saved tensors, the operator for compiled regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from inweave.ops.common.layout import as_rows
from inweave.ops.group_norm import group_norm, group_norm_and_input, reference
from inweave.ops.row_norm import add_layer_norm, layer_norm_and_input, rms_norm
from tests.unit.ops.interpreter import run_interpreted
from tests.unit.ops.saving import saved_tensors

#: (batch, channels, height, width, groups): groups not of powers of two, several blocks, chunks that do not divide
IMAGES = [(1, 40, 9, 7, 4), (2, 8, 4, 4, 4), (1, 320, 3, 5, 32), (1, 270, 5, 5, 3), (2, 6, 1, 1, 1), (1, 24, 18, 17, 2)]
ROWS = [(5, 40), (3, 1), (33, 128), (2, 640), (70, 24)]


def values(*shape: int, dtype: torch.dtype, seed: int, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def image_inputs(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 3.0) -> dict[str, Any]:
    batch, channels, height, width, groups = shape
    return {
        "x": channels_last(values(batch, channels, height, width, dtype=dtype, seed=1, mean=mean)),
        "weight": values(channels, dtype=dtype, seed=2),
        "bias": values(channels, dtype=dtype, seed=3),
        "shift": values(batch, channels, dtype=dtype, seed=4),
        "dy": channels_last(values(batch, channels, height, width, dtype=dtype, seed=5)),
        "more": channels_last(values(batch, channels, height, width, dtype=dtype, seed=6)),
        "groups": groups,
    }


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def by_torch(i: dict[str, Any], silu: bool, shifted: bool) -> list[torch.Tensor]:
    """Result and gradient by torch's own operations, in the dtype of the inputs."""
    x = i["x"].clone().requires_grad_()
    h = x + i["shift"][:, :, None, None] if shifted else x
    y = functional.group_norm(h, i["groups"], i["weight"], i["bias"], 1e-5)
    y = functional.silu(y) if silu else y
    torch.autograd.backward([y, x * 1], [i["dy"], i["more"]])
    return [y.detach(), x.grad]


def by_work(work: Any, i: dict[str, Any], silu: bool, shifted: bool) -> list[torch.Tensor]:
    x, shift = as_rows(i["x"]), i["shift"] if shifted else None
    y, mean, rstd = work.group_norm(x, i["weight"], i["bias"], shift, i["groups"], 1e-5, silu)
    dx = work.group_norm_backward(
        as_rows(i["dy"]), x, i["weight"], i["bias"], shift, mean, rstd, silu, as_rows(i["more"])
    )
    return [part.unflatten(1, i["x"].shape[2:]).permute(0, 3, 1, 2) for part in (y, dx)]


def rows_by_torch(i: dict[str, Any], rms: bool, added: bool) -> list[torch.Tensor]:
    x = i["x"].clone().requires_grad_()
    h = x + i["added"] if added else x
    if rms:
        y = functional.rms_norm(h, h.shape[-1:], i["weight"], 1e-5)
    else:
        y = functional.layer_norm(h, h.shape[-1:], i["weight"], i["bias"], 1e-5)
    torch.autograd.backward([y, h * 1], [i["dy"], i["more"]])
    return [h.detach(), y.detach(), x.grad]


def rows_by_work(work: Any, i: dict[str, Any], rms: bool, added: bool) -> list[torch.Tensor]:
    bias = None if rms else i["bias"]
    total, y, mean, rstd = work.row_norm(i["x"], i["added"] if added else None, i["weight"], bias, 1e-5, rms)
    return [total, y, work.row_norm_backward([i["dy"]], total, i["weight"], mean, rstd, rms, i["more"])]


def row_inputs(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    names = ("x", "added", "dy", "more")
    inputs = {name: values(*shape, dtype=dtype, seed=number, mean=1.0) for number, name in enumerate(names)}
    return inputs | {
        "weight": values(shape[1], dtype=dtype, seed=8), "bias": values(shape[1], dtype=dtype, seed=9)
    }  # fmt: skip


def errors(results: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return the largest and the root mean square error of each, in units in the last place of its largest number."""
    gaps = [(one.double() - two).abs() / two.abs().max() for one, two in zip(results, truth, strict=True)]
    eps = torch.finfo(dtype).eps
    return [(float(gap.max() / eps), float(gap.square().mean().sqrt() / eps)) for gap in gaps]


#: the largest and the average error of rounding once: no result is held to less
FLOORS = 0.5, 0.29
#: float32 is not computed in a wider dtype: subtraction, two products and a sum are rounded, and errors add as squares
FLOAT32_FLOORS = 0.5 * 4**0.5, 0.29


def assert_as_exact(
    ours: list[torch.Tensor], peer: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype, *case: object
) -> None:
    """Errors against float64 are at most twice the peer's; ``case`` is shown where they are not."""
    mine, theirs = (errors(results, truth, dtype) for results in (ours, peer))
    floors = FLOAT32_FLOORS if dtype == torch.float32 else FLOORS
    for one, two in zip(mine, theirs, strict=True):
        for own, other, floor in zip(one, two, floors, strict=True):
            assert own <= 2 * max(other, floor), (dtype, *case, mine, theirs)


def compare(
    ours: Callable[..., list[torch.Tensor]], peer: Callable[..., list[torch.Tensor]], inputs: dict[str, Any], *how: bool
) -> None:
    dtype = inputs["x"].dtype
    truth = peer(widened(inputs), *how)
    assert_as_exact(ours(inputs, *how), peer(inputs, *how), truth, dtype, inputs["x"].shape, how)


def check_all(images: Any, rows: Any, dtypes: list[torch.dtype]) -> int:
    """Compare implementations with torch's own in every dtype, against float64; return the number of comparisons."""
    count = 0
    for dtype in dtypes:
        for number, shape in enumerate(IMAGES):
            how = (number % 2 == 0, number % 3 == 0)
            compare(lambda *a: by_work(images, *a), by_torch, image_inputs(shape, dtype), *how)
            count += 1
        for number, size in enumerate(ROWS):
            for rms in (False, True):
                if size[1] == 1 and not rms:  # one number minus itself: torch's result is rounding, too
                    continue
                compare(lambda *a: rows_by_work(rows, *a), rows_by_torch, row_inputs(size, dtype), rms, number % 2 == 0)
                count += 1
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_references_are_as_exact_as_torch(dtype: torch.dtype) -> None:
    from inweave.ops.row_norm import reference as rows

    assert check_all(reference, rows, [dtype]) >= 15


def interpreted() -> int:
    """What the other process runs: the kernels in the interpreter."""
    from inweave.ops.group_norm import triton as images
    from inweave.ops.row_norm import triton as rows

    count = check_all(images, rows, [torch.float32, torch.float16])
    # a mean a thousand standard deviations from zero: single sums of squares would leave three digits
    inputs = image_inputs(IMAGES[-1], torch.float32, mean=1000.0)
    compare(lambda *a: by_work(images, *a), by_torch, inputs, True, True)
    rows_of = row_inputs((33, 40), torch.float32)
    for uses in (1, 2, 3):
        dys = [values(33, 40, dtype=torch.float32, seed=20 + number) for number in range(uses)]
        _, _, mean, rstd = rows.row_norm(rows_of["x"], None, rows_of["weight"], None, 1e-5, False)
        summed, fused = (
            rows.row_norm_backward(each, rows_of["x"], rows_of["weight"], mean, rstd, False, rows_of["more"])
            for each in ([torch.stack(dys).sum(0)], dys)
        )
        torch.testing.assert_close(fused, summed, rtol=1e-5, atol=1e-5)
    twice = [by_work(images, inputs, True, True) for _ in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*twice, strict=True))
    return count


def test_kernels_are_as_exact_as_torch_in_the_interpreter() -> None:
    assert run_interpreted(__name__) >= 30


def stored_for(work: Callable[[], Any]) -> list[torch.Tensor]:
    with saved_tensors() as stored:
        work()
    return stored


def test_autograd_agrees_and_stores_the_input_alone() -> None:
    i = image_inputs((2, 12, 5, 3, 3), torch.float64)
    x, shift = i["x"].requires_grad_(), i["shift"].requires_grad_()

    def function(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        y, same = group_norm_and_input(x, i["weight"], i["bias"], 3, 1e-5, silu=True, shift=shift)
        return y * same

    assert torch.autograd.gradcheck(function, [x, shift], fast_mode=True)
    large = [tensor for tensor in stored_for(lambda: function(x, shift)) if tensor.numel() == x.numel()]
    # the norm stores x; the product stores its two factors, of which x is one
    assert len({tensor.data_ptr() for tensor in large}) == 2
    y = group_norm(x, i["weight"], i["bias"], 3, 1e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(y, functional.group_norm(x, 3, i["weight"], i["bias"], 1e-5), rtol=1e-10, atol=1e-10)


def test_row_norms_agree_with_autograd_and_store_the_sum_alone() -> None:
    i = row_inputs((6, 20), torch.float64)
    x, added = i["x"].view(2, 3, 20).requires_grad_(), i["added"].view(2, 3, 20).requires_grad_()

    def summed(x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        total, y = add_layer_norm(x, added, i["weight"], i["bias"], 1e-5)
        return total.sin() + y

    def unsummed(x: torch.Tensor) -> torch.Tensor:
        same, y = layer_norm_and_input(x, i["weight"], i["bias"], 1e-5)
        return same.sin() + y + rms_norm(x, i["weight"], 1e-5) + rms_norm(x, None, 1e-5)

    assert torch.autograd.gradcheck(summed, [x, added], fast_mode=True)

    def thrice(x: torch.Tensor) -> torch.Tensor:
        same, one, two, three = layer_norm_and_input(x, i["weight"], i["bias"], 1e-5, uses=3)
        return same + one.sin() + two.cos() * three

    def partly(x: torch.Tensor) -> torch.Tensor:
        return layer_norm_and_input(x, i["weight"], i["bias"], 1e-5, uses=3)[2].sin()

    for function in (unsummed, thrice, partly):
        assert torch.autograd.gradcheck(function, [x], fast_mode=True)
    stored = stored_for(lambda: add_layer_norm(x, added, i["weight"], i["bias"], 1e-5))
    assert len([tensor for tensor in stored if tensor.numel() == x.numel()]) == 1


def test_row_norms_keep_the_layout_of_heads() -> None:
    """Queries are (batch, heads, tokens, width) in memory (batch, tokens, heads, width): nothing is copied."""
    heads = values(2, 5, 3, 8, dtype=torch.float32, seed=1).transpose(1, 2).requires_grad_()
    weight = values(8, dtype=torch.float32, seed=2)
    y = rms_norm(heads, weight, 1e-5)
    assert y.stride() == heads.stride()
    assert next(tensor.data_ptr() for tensor in stored_for(lambda: rms_norm(heads, weight, 1e-5))) == heads.data_ptr()
    plain = functional.rms_norm(heads, (8,), weight, 1e-5)
    torch.testing.assert_close(y, plain)
    dy = values(2, 3, 5, 8, dtype=torch.float32, seed=3)  # a gradient in another layout
    one, two = (torch.autograd.grad(each, heads, dy)[0] for each in (y, plain))
    torch.testing.assert_close(one, two)
    single = values(8, dtype=torch.float32, seed=4)
    torch.testing.assert_close(rms_norm(single, weight, 1e-5), functional.rms_norm(single, (8,), weight, 1e-5))
    slices = values(4, 6, 16, dtype=torch.float32, seed=5)[:, ::2, :8]
    torch.testing.assert_close(rms_norm(slices, weight, 1e-5), functional.rms_norm(slices, (8,), weight, 1e-5))


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_trained_norm_has_its_gradients(trained: str) -> None:
    i = image_inputs((1, 8, 3, 3, 2), torch.float32)
    parameter = i[trained].requires_grad_()
    y = group_norm(i["x"].requires_grad_(), i["weight"], i["bias"], 2, 1e-5, silu=True)
    y.sum().backward()
    assert parameter.grad is not None and i["x"].grad is not None
    _, y = add_layer_norm(values(2, 8, dtype=torch.float32, seed=1), values(2, 8, dtype=torch.float32, seed=2),
                          i["weight"], i["bias"], 1e-5)  # fmt: skip
    parameter.grad = None
    y.square().sum().backward()
    assert parameter.grad is not None


def test_frozen_layer_norms_of_torch_compute_no_gradient_of_their_weights() -> None:
    """Where torch computes, its backward pass gets a mask of the gradients to compute: no others."""
    from torch.utils._python_dispatch import TorchDispatchMode

    masks = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "native_layer_norm_backward" in str(function):
                masks.append(args[-1])
            return function(*args, **(kwargs or {}))

    norm_of_torch = torch.nn.LayerNorm(8).requires_grad_(False)
    y = norm_of_torch(torch.randn(3, 8, requires_grad=True))
    with Spy():
        y.sum().backward()
    assert masks == [[True, False, False]]


def test_a_compiled_region_calls_one_operator_and_stays_channels_last() -> None:

    i = image_inputs((2, 12, 5, 3, 3), torch.float32)
    arguments = (i["x"].requires_grad_(), i["weight"], i["bias"], i["shift"], 3, 1e-5, True)
    torch.library.opcheck(torch.ops.inweave.group_norm.default, arguments)

    def function(x: torch.Tensor) -> torch.Tensor:
        return group_norm(x * 1.0, i["weight"], i["bias"], 3, 1e-5, silu=True)

    plain, fast = function(i["x"]), torch.compile(function, backend="aot_eager", fullgraph=True)(i["x"])
    assert torch.equal(plain, fast) and fast.is_contiguous(memory_format=torch.channels_last)
    grads = [torch.autograd.grad(y, i["x"], i["dy"])[0] for y in (plain, fast)]
    assert torch.equal(*grads)


def test_the_outline_allocates_what_the_kernels_do() -> None:
    i = image_inputs((2, 12, 5, 3, 3), torch.bfloat16)
    meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in i.items()}
    for inputs in (i, meta):
        x = inputs["x"].requires_grad_()
        y, same = group_norm_and_input(x, inputs["weight"], inputs["bias"], 3, 1e-5, silu=True, shift=inputs["shift"])
        y.backward(inputs["dy"])
        assert y.stride() == i["x"].stride() and x.grad.stride() == i["x"].stride() and same.shape == x.shape
        rows = inputs["x"].detach().reshape(2, -1, 12).requires_grad_()
        total, y = add_layer_norm(rows, rows, inputs["weight"], inputs["bias"], 1e-5)
        (total + y).sum().backward()
        assert y.dtype == torch.bfloat16 and rows.grad.shape == rows.shape


def test_kernels_compile_for_a_gpu() -> None:
    """In bfloat16, which the interpreter has not, and with the machine code that a Hopper GPU loads."""
    from inweave.ops.group_norm import triton as images
    from inweave.ops.row_norm import triton as rows
    from tests.unit.ops.compiling import compiled_size

    tiling = images._Tiling(torch.Size((1, 64, 40)), 4)
    switches = {"SHIFT": True, "SILU": True}
    for kernel, options in (
        (images._moments_kernel, {"SHIFT": True}),
        (images._normalize_kernel, {**switches, "CHUNKS": 16}),
        (images._averages_kernel, switches),
        (images._gradient_kernel, {**switches, "CHUNKS": 16, "MORE": True}),
    ):
        assert compiled_size(kernel, tiling.shape | options) > 1000
    common = {"WIDTH": 128, "ROWS": 2, "RMS": False, "WEIGHT": True}
    assert compiled_size(rows._norm_kernel, {**common, "ADD": True, "BIAS": True}) > 1000
    assert compiled_size(rows._gradient_kernel, {**common, "MORE": True, "USES": 3}) > 1000
