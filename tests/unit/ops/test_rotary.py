"""Joined heads: reference and Triton's kernels against float64, saved tensors, the operator for compiled regions."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from inweave.ops.rotary import join_heads, join_projections, reference
from tests.unit.ops.interpreter import run_interpreted
from tests.unit.ops.saving import saved_tensors

EPS = 1e-6


class Case(NamedTuple):
    """``packed``: parts are column slices of projections of queries, keys and values at once."""

    batch: int
    rows: tuple[int, ...]
    heads: int
    size: int
    norm: bool = True
    weight: bool = True
    rotary: bool = True
    packed: bool = False


CASES = [
    Case(1, (5, 9), 3, 16),
    Case(2, (5, 9), 3, 16, packed=True),
    Case(2, (7,), 2, 8, packed=True),
    Case(2, (3, 4), 5, 64, rotary=False),
    Case(1, (3, 4), 3, 40, rotary=False, packed=True),
    Case(1, (1, 4), 9, 128),
    Case(2, (6,), 24, 24, weight=False),
    Case(2, (2, 3), 3, 10, norm=False, packed=True),
    Case(1, (1,), 1, 2),
    Case(1, (4,), 17, 64, weight=False, rotary=False),
]


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs_of(case: Case, dtype: torch.dtype, draw: int = 0) -> dict[str, Any]:
    parts, seeds = [], 1000 * draw
    for number, rows in enumerate(case.rows):
        width = case.heads * case.size
        packed = values(case.batch, rows, 3 * width, dtype=dtype, seed=seeds + number)
        part = packed[..., width : 2 * width].unflatten(-1, (case.heads, case.size))
        parts.append(part if case.packed else part.contiguous())
    total = sum(case.rows)
    angles = values(total, case.size // 2, dtype=torch.float64, seed=seeds + 5).mul(9).repeat_interleave(2, 1)
    return {
        "parts": parts,
        "weights": [
            values(case.size, dtype=dtype, seed=seeds + 8 + number) if case.norm and case.weight else None
            for number in range(len(parts))
        ],
        "cos": angles.cos().float() if case.rotary else None,
        "sin": angles.sin().float() if case.rotary else None,
        "dy": values(case.batch, total, case.heads, case.size, dtype=dtype, seed=seeds + 6),
    }


def moved(inputs: dict[str, Any], **how: Any) -> dict[str, Any]:
    """All tensors on another device or in another dtype; slices stay slices."""

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(each) for each in value]
        if value is None or value.is_contiguous():
            return None if value is None else value.to(**how)
        base = value._base.to(**how)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(value) for name, value in inputs.items()}


def by_torch(i: dict[str, Any], case: Case) -> list[torch.Tensor]:
    """Result and gradients by the operations of a transformer, each rounded to the dtype of the inputs."""
    parts = [part.detach().requires_grad_() for part in i["parts"]]
    normed = [
        functional.rms_norm(part, (case.size,), weight, EPS) if case.norm else part
        for part, weight in zip(parts, i["weights"], strict=True)
    ]
    y = torch.cat(normed, 1)
    if case.rotary:
        wide = torch.promote_types(y.dtype, torch.float32)
        real, imaginary = y.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], -1).flatten(-2)
        y = (y.to(wide) * i["cos"][:, None] + turned.to(wide) * i["sin"][:, None]).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, parts, i["dy"])]


def by_work(work: Any, i: dict[str, Any], case: Case) -> list[torch.Tensor]:
    eps = EPS if case.norm else None
    y = work.join_heads(i["parts"], i["weights"], eps, i["cos"], i["sin"])
    grads = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in i["parts"]]
    work.join_heads_backward(i["dy"], i["parts"], i["weights"], eps, i["cos"], i["sin"], grads)
    for number, part in enumerate(i["parts"]):  # one at a time and into columns of a wider matrix, the same bits
        wide = part.new_full((*part.shape[:2], 3, *part.shape[2:]), 7.0)
        some = [wide[:, :, 1] if each == number else None for each in range(len(grads))]
        work.join_heads_backward(i["dy"], i["parts"], i["weights"], eps, i["cos"], i["sin"], some)
        assert torch.equal(wide[:, :, 1], grads[number]) and bool((wide[:, :, ::2] == 7).all())
    assert y.is_contiguous()
    return [y, *grads]


def errors(results: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return (tensors, 2): largest error and mean square of each, in units in the last place of its largest number."""
    gaps = [(one.double() - two).abs() / two.abs().max() for one, two in zip(results, truth, strict=True)]
    eps = torch.finfo(dtype).eps
    return torch.tensor([(float(gap.max() / eps), float((gap / eps).square().mean())) for gap in gaps])


def over_draws(each: list[torch.Tensor]) -> torch.Tensor:
    """The largest and the average error of all draws."""
    all_of_them = torch.stack(each)
    return torch.stack([all_of_them[..., 0].amax(0), all_of_them[..., 1].mean(0).sqrt()], -1)


def compare(work: Any, case: Case, dtype: torch.dtype, device: str = "cpu", *, draws: int = 1) -> None:
    """At most twice torch's own errors against float64, the largest and the average one, or those of rounding once.

    A few hundred numbers say little about the largest error: in one draw it is 0.4 to 1.7 units for either side.
    """
    mine, theirs = [], []
    for draw in range(draws):
        inputs = moved(inputs_of(case, dtype, draw), device=device)
        truth = by_torch(moved(inputs, dtype=torch.float64), case)
        mine.append(errors(by_work(work, inputs, case), truth, dtype))
        theirs.append(errors(by_torch(inputs, case), truth, dtype))
    ours, peers = over_draws(mine), over_draws(theirs)
    assert bool((ours <= 2 * torch.maximum(peers, torch.tensor([0.5, 0.29]))).all()), (dtype, case, ours, peers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    for case in CASES:
        compare(reference, case, dtype)


def interpreted() -> int:
    """Compare the kernels in the interpreter, which runs in another process."""
    from inweave.ops.rotary import triton as kernels

    for dtype in (torch.float32, torch.float16):
        for case in CASES:
            compare(kernels, case, dtype)
    return len(CASES)


def test_kernels_are_as_exact_as_torch_in_the_interpreter() -> None:
    assert run_interpreted(__name__) == len(CASES)


def joined(i: dict[str, Any], case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    rotary = (i["cos"], i["sin"]) if case.rotary else None
    return join_heads(parts, weights=i["weights"], eps=EPS if case.norm else None, rotary=rotary)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_autograd_agrees(case: Case) -> None:
    i = moved(inputs_of(case, torch.float64), dtype=torch.float64)
    parts = [part.detach().requires_grad_() for part in i["parts"]]
    assert torch.autograd.gradcheck(lambda *parts: joined(i, case, list(parts)), parts, fast_mode=True)
    torch.testing.assert_close(joined(i, case, parts).detach(), by_torch(i, case)[0], rtol=1e-9, atol=1e-9)


def test_the_parts_alone_are_stored_and_nothing_without_a_norm() -> None:
    for case in (CASES[1], CASES[7]):
        i = inputs_of(case, torch.float32)
        parts = [part.detach().requires_grad_() for part in i["parts"]]
        with saved_tensors() as stored:
            y = joined(i, case, parts)
        large = [tensor.data_ptr() for tensor in stored if tensor.dim() == 4]
        assert large == ([part.data_ptr() for part in parts] if case.norm else [])
        y.backward(i["dy"])
        assert all(part.grad is not None for part in parts)


def test_a_part_that_needs_no_gradient_gets_none() -> None:
    i = inputs_of(CASES[1], torch.float32)
    both, one = ([part.detach().requires_grad_() for part in i["parts"]] for _ in range(2))
    one[0].requires_grad_(False)
    for parts in (both, one):
        joined(i, CASES[1], parts).backward(i["dy"])
    assert one[0].grad is None and torch.equal(one[1].grad, both[1].grad)


def test_trained_weights_have_their_gradients() -> None:
    case = CASES[0]
    i = moved(inputs_of(case, torch.float64), dtype=torch.float64)
    weights = [weight.requires_grad_() for weight in i["weights"]]

    def function(*weights: torch.Tensor) -> torch.Tensor:
        return join_heads(i["parts"], weights=weights, eps=EPS, rotary=(i["cos"], i["sin"]))

    assert torch.autograd.gradcheck(function, weights, fast_mode=True)


def test_heads_that_are_only_joined_have_views_for_gradients() -> None:
    parts = [values(1, rows, 3, 8, dtype=torch.float32, seed=rows).requires_grad_() for rows in (2, 5)]
    dy = values(1, 7, 3, 8, dtype=torch.float32, seed=1)
    y = join_heads(parts)
    assert torch.equal(y, torch.cat(parts, 1)) and join_heads(parts[:1]) is parts[0]
    grads = torch.autograd.grad(y, parts, dy)
    assert [grad.untyped_storage().data_ptr() for grad in grads] == [dy.untyped_storage().data_ptr()] * 2


def test_tensors_that_do_not_go_together_are_refused() -> None:
    i = inputs_of(CASES[0], torch.float32)
    parts, weights, tables = i["parts"], i["weights"], (i["cos"], i["sin"])
    with pytest.raises(ValueError, match="0 parts"):
        join_heads([])
    with pytest.raises(ValueError, match=r"3 parts of a sequence"):
        join_heads([*parts, parts[0]], rotary=tables)
    with pytest.raises(ValueError, match=r"differ in more than their rows: \(1, 5, 3, 16\).*\(1, 9, 2, 16\)"):
        join_heads([parts[0], parts[1][:, :, :2]], rotary=tables)
    with pytest.raises(ValueError, match=r"cosines or sines are \(13, 16\), of 14 rows"):
        join_heads(parts, rotary=(i["cos"][:-1], i["sin"]))
    with pytest.raises(ValueError, match=r"weight of a norm is \(15,\)"):
        join_heads(parts, weights=[weights[0], weights[1][:-1]], eps=EPS)
    with pytest.raises(ValueError, match=r"torch.float64, of heads of 16 numbers in torch.float32"):
        join_heads(parts, weights=[weights[0], weights[1].double()], eps=EPS)


def test_a_compiled_region_calls_the_operator() -> None:
    for case in (CASES[1], CASES[2], CASES[4], CASES[7]):
        i = inputs_of(case, torch.float32)
        parts = [part.detach().requires_grad_() for part in i["parts"]]
        second, second_weight = (parts[1], i["weights"][1]) if len(parts) == 2 else (None, None)
        arguments = (parts[0], second, i["weights"][0], second_weight, EPS if case.norm else None, i["cos"], i["sin"])
        torch.library.opcheck(torch.ops.inweave.join_heads.default, arguments)

        def function(parts: list[torch.Tensor], i: dict[str, Any] = i, case: Case = case) -> torch.Tensor:
            return joined(i, case, parts) * 2.0

        plain, fast = function(parts), torch.compile(function, backend="aot_eager", fullgraph=True)(parts)
        assert torch.equal(plain, fast)
        grads = [torch.autograd.grad(y, parts, i["dy"]) for y in (plain, fast)]
        assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_the_meta_device_allocates_what_the_kernels_do() -> None:
    i = moved(inputs_of(CASES[1], torch.bfloat16), device="meta")
    parts = [part.detach().requires_grad_() for part in i["parts"]]
    y = joined(i, CASES[1], parts)
    y.backward(i["dy"])
    assert y.is_contiguous() and y.dtype == torch.bfloat16
    assert all(part.grad.shape == part.shape and part.grad.is_contiguous() for part in parts)


@pytest.mark.parametrize("shape", [(24, 128, True), (38, 64, False)], ids=["flux", "sd3.5"])
def test_kernels_compile_for_a_gpu_and_read_16_bytes_at_once(shape: tuple[int, int, bool]) -> None:
    """In bfloat16, which the interpreter has not, and with the machine code that a Hopper GPU loads."""
    from inweave.ops.rotary import triton as kernels
    from tests.unit.ops.compiling import compiled_code

    heads, size, rotary = shape
    tiling = kernels._tiling(heads, size)
    warps = tiling.pop("num_warps")
    for two in (True, False):
        constants = tiling | {"TWO": two, "NORM": True, "WEIGHT": True, "ROTARY": rotary}
        for kernel, loads in ((kernels._join_kernel, 2), (kernels._gradient_kernel, 4)):
            code = compiled_code(kernel, constants, warps=warps, aligned=True)
            assert len(code["cubin"]) > 1000
            assert code["ptx"].count("ld.global.v4.b32") >= loads and code["ptx"].count("st.global.v4.b32") == 2


def packed_inputs(case: Case, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """Return products with queries, keys and values of every part, the settings, and gradients of the three results."""
    width = (3, case.heads, case.size)
    parts = [values(case.batch, rows, *width, dtype=dtype, seed=n) for n, rows in enumerate(case.rows)]
    i = inputs_of(case, dtype)
    weights = [[weight, None if weight is None else weight.flip(0)] for weight in i["weights"]]
    dys = [values(case.batch, sum(case.rows), *width[1:], dtype=dtype, seed=60 + n) for n in range(3)]
    rotary = (i["cos"], i["sin"]) if case.rotary else None
    return parts, {"weights": weights, "eps": EPS if case.norm else None, "rotary": rotary}, dys


def one_by_one(parts: list[torch.Tensor], settings: dict[str, Any]) -> list[torch.Tensor]:
    q, k, v = zip(*(part.unbind(2) for part in parts), strict=True)
    pairs = list(zip(*settings["weights"], strict=True))
    return [
        *(join_heads(each, **settings | {"weights": pair}) for each, pair in zip((q, k), pairs, strict=True)),
        join_heads(v),
    ]


@pytest.mark.parametrize(
    "case", [CASES[1], CASES[2], CASES[3], CASES[6], CASES[7], CASES[9]._replace(norm=False)], ids=str
)
def test_columns_of_one_product_have_the_bits_of_three_operators(case: Case) -> None:
    parts, settings, dys = packed_inputs(case, torch.float32)
    for part in parts:
        part.requires_grad_()
    plain, packed = one_by_one(parts, settings), join_projections(parts, **settings)
    assert all(torch.equal(one, two) for one, two in zip(plain, packed, strict=True))
    assert all(each.is_contiguous() for each in packed)
    grads = [torch.autograd.grad(results, parts, dys) for results in (plain, packed)]
    assert all(torch.equal(one, two) and two.is_contiguous() for one, two in zip(*grads, strict=True))
    if len(parts) == 2:
        parts[0].requires_grad_(False)
        (of_second,) = torch.autograd.grad(join_projections(parts, **settings), parts[1:], dys)
        assert torch.equal(of_second, grads[0][1])


def test_columns_of_one_product_in_a_compiled_region_and_on_the_meta_device() -> None:
    for case in (CASES[1], CASES[2], CASES[7]):
        parts, settings, dys = packed_inputs(case, torch.float32)
        for part in parts:
            part.requires_grad_()
        cos, sin = settings["rotary"]
        flat = [weight for pair in settings["weights"] for weight in pair] + [None] * (4 - 2 * len(parts))
        second = parts[1] if len(parts) == 2 else None
        arguments = (parts[0], second, *flat, settings["eps"], cos, sin)
        torch.library.opcheck(torch.ops.inweave.join_projections.default, arguments)

        def function(parts: list[torch.Tensor], settings: dict[str, Any] = settings) -> list[torch.Tensor]:
            return [2.0 * each for each in join_projections(parts, **settings)]

        plain, fast = function(parts), torch.compile(function, backend="aot_eager", fullgraph=True)(parts)
        grads = [torch.autograd.grad(results, parts, dys) for results in (plain, fast)]
        assert all(torch.equal(one, two) for one, two in zip([*plain, *grads[0]], [*fast, *grads[1]], strict=True))
    meta = [part.detach().to("meta").requires_grad_() for part in parts]
    tables = tuple(table.to("meta") for table in settings["rotary"])
    results = join_projections(meta, eps=EPS, rotary=tables)
    torch.autograd.backward(list(results), [torch.empty_like(each) for each in results])
    assert all(part.grad.shape == part.shape for part in meta)


def test_trained_weights_of_columns_have_their_gradients() -> None:
    parts, settings, dys = packed_inputs(CASES[1], torch.float32)
    weights = [weight.requires_grad_() for pair in settings["weights"] for weight in pair]
    plain, packed = one_by_one(parts, settings), join_projections(parts, **settings)
    grads = [torch.autograd.grad(results[:2], weights, dys[:2]) for results in (plain, packed)]
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
