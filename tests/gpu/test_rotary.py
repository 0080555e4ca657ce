"""Joined heads on a real GPU: against float64, twice the same bits, compiled, captured, and in whole networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.unit.models.test_fused_joint import VARIANTS, gradients, network  # noqa: E402
from tests.unit.ops.test_rotary import (  # noqa: E402
    CASES,
    Case,
    by_work,
    compare,
    inputs_of,
    joined,
    moved,
    one_by_one,
    packed_inputs,
)

from inweave.models.fused.blocks import fuse_blocks  # noqa: E402
from inweave.ops.rotary import join_projections  # noqa: E402
from inweave.ops.rotary import triton as kernels  # noqa: E402
from inweave.training.execution.kernels import step_kernels  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Flux.1's double and single blocks, Stable Diffusion 3.5 Large's and Medium's, at 1024 pixels
PUBLISHED = [
    Case(1, (512, 4096), 24, 128), Case(1, (512, 4096), 24, 128, packed=True), Case(1, (4608,), 24, 128, packed=True),
    Case(2, (512, 1024), 24, 128, packed=True), Case(1, (4096, 333), 38, 64, rotary=False),
    Case(1, (4096, 333), 38, 64, rotary=False, packed=True), Case(2, (4096,), 24, 64, rotary=False, packed=True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES + PUBLISHED, ids=str)
def test_kernels_are_as_exact_as_torch_and_repeat_their_bits(case: Case, dtype: torch.dtype) -> None:
    compare(kernels, case, dtype, "cuda", draws=1 if case in PUBLISHED else 16)
    inputs = moved(inputs_of(case, dtype), device="cuda")
    once, again = (by_work(kernels, inputs, case) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(once, again, strict=True))


@pytest.mark.parametrize("case", [PUBLISHED[0], PUBLISHED[2], PUBLISHED[5], CASES[7]], ids=str)
def test_a_compiled_region_has_the_bits_of_the_operator(case: Case) -> None:
    i = moved(inputs_of(case, torch.bfloat16), device="cuda")
    parts = [part.detach().requires_grad_() for part in i["parts"]]

    def function(parts: list[torch.Tensor]) -> torch.Tensor:
        return joined(i, case, parts)

    plain, fast = function(parts), torch.compile(function, fullgraph=True, dynamic=False)(parts)
    assert torch.equal(plain, fast)
    grads = [torch.autograd.grad(y, parts, i["dy"]) for y in (plain, fast)]
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("case", [*PUBLISHED, CASES[2], CASES[7]], ids=str)
def test_columns_of_one_product_have_the_bits_of_three_operators(case: Case) -> None:
    parts, settings, dys = packed_inputs(case, torch.bfloat16)
    parts = [part.cuda().requires_grad_() for part in parts]
    dys = [dy.cuda() for dy in dys]
    settings["weights"] = [
        [None if weight is None else weight.cuda() for weight in pair] for pair in settings["weights"]
    ]
    settings["rotary"] = settings["rotary"] and tuple(table.cuda() for table in settings["rotary"])

    def function(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return join_projections(parts, **settings)

    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    plain, packed, fast = one_by_one(parts, settings), function(parts), compiled(parts)
    expected = [*plain, *torch.autograd.grad(plain, parts, dys)]
    for results in (packed, fast):
        grads = torch.autograd.grad(results, parts, dys)
        assert all(torch.equal(one, two) for one, two in zip(expected, [*results, *grads], strict=True))


def test_a_recorded_operator_is_the_operator() -> None:
    case = PUBLISHED[1]
    i = moved(inputs_of(case, torch.bfloat16), device="cuda")
    parts = [part.detach().requires_grad_() for part in i["parts"]]

    def work() -> list[torch.Tensor]:
        y = joined(i, case, parts)
        return [y.detach(), *torch.autograd.grad(y, parts, i["dy"])]

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for part in parts:
                part.mul_(factor)
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(recorded, work(), strict=True))


def distance(results: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of the output and of all gradients together, relative."""
    grads = [name for name in truth if name != "output"]
    gap = sum(float((results[name].double() - truth[name]).square().sum()) for name in grads)
    output = (results["output"].double() - truth["output"]).norm() / truth["output"].norm()
    return float(output), (gap / sum(float(truth[name].square().sum()) for name in grads)) ** 0.5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_networks_train_as_the_plain_ones_do(variant: str, dtype: torch.dtype, compiled: bool) -> None:
    """Against the plain network in float64: at most twice as far from it as the plain one in the same dtype.

    Both with the kernels of a step, so that attention is the same. torch's own choice is cuDNN's attention, which reads
    out of bounds in Flux's backward pass (`inweave.ops.attention`): gradients of the plain network are then 1e34, or
    NaN.
    """
    plain, inputs = network(variant, torch.device("cuda"))
    truth = gradients(plain, inputs)
    narrow = copy.deepcopy(plain).to(dtype)
    with step_kernels(torch.device("cuda"), deterministic=False):
        theirs = gradients(narrow, inputs)
    assert all(bool(each.isfinite().all()) for each in theirs.values())
    assert fuse_blocks(narrow)
    if compiled:
        blocks: list[Any] = [*narrow.transformer_blocks, *getattr(narrow, "single_transformer_blocks", [])]
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False)
    with step_kernels(torch.device("cuda"), deterministic=False):
        mine = gradients(narrow, inputs)
    assert mine.keys() == theirs.keys() == truth.keys()
    assert all(bool(each.isfinite().all()) for each in mine.values())
    # 1e-6: diffusers' rotation is float32 in the network of float64, too
    for one, two in zip(distance(mine, truth), distance(theirs, truth), strict=True):
        assert one <= 2 * two + 1e-6, (variant, dtype, compiled, one, two)
