"""Two frozen layers in 8 bits with GELU between them: the bits of doing one thing after the other, each way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from inweave.models.fused.blocks import fuse_blocks, restore_blocks
from inweave.ops.activation import tanh_gelu
from inweave.ops.fp8 import frozen_feed_forward, select
from inweave.ops.quantized.fp8 import Fp8Linear
from inweave.training.memory import checkpointing
from tests.unit.models.test_fused_joint import Operations, gradients, network
from tests.unit.ops.interpreter import run_interpreted
from tests.unit.ops.test_fp8 import Graphs, numbers

OPERATORS = ("fp8_product", "fp8_gradient", "fp8_linear", "gelu_rows", "gelu_gradient_rows", "tanh_gelu")
INPUTS, WIDTH, COLUMNS, OUTPUTS = 32, 64, 16, 48


def layers(columns: int, dtype: torch.dtype, device: str = "cpu", scale: int = 1) -> tuple[Fp8Linear, Fp8Linear]:
    """Both, the second one without a bias; ``scale``: of their sizes."""
    generator = torch.Generator().manual_seed(columns)
    made: list[Fp8Linear] = []
    for into, out in ((INPUTS * scale, WIDTH * scale), (columns + WIDTH * scale, OUTPUTS * scale)):
        layer = nn.Linear(into, out, bias=not made, device=device, dtype=dtype).requires_grad_(False)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / into**0.5)
        Fp8Linear.quantize(layer)
        assert isinstance(layer, Fp8Linear)
        made.append(layer)
    return made[0], made[1]


def one_after_the_other(
    x: torch.Tensor, first: nn.Module, second: nn.Module, left: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor = second(tanh_gelu(first(x), left))
    return y


def results(work: Callable[..., torch.Tensor], columns: int, dtype: torch.dtype, device: str, scale: int) -> list[Any]:
    """What it returns, and the gradients of its inputs: of both, and of one where the other needs none."""
    first, second = layers(columns, dtype, device, scale)
    x = numbers(10, INPUTS * scale, dtype=dtype).to(device).view(2, 5, -1)
    left = numbers(10, columns, seed=1, dtype=dtype).to(device).view(2, 5, -1) if columns else None
    dy = numbers(10, OUTPUTS * scale, seed=2, dtype=dtype).to(device).view(2, 5, -1)
    seen = []
    for of_x, of_left in ((True, True), (True, False), (False, True)) if columns else ((True, False),):
        inputs = [x.clone().requires_grad_(of_x), None if left is None else left.clone().requires_grad_(of_left)]
        y = work(inputs[0], first, second, inputs[1])
        leaves = [each for each in inputs if each is not None and each.requires_grad]
        seen += [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    return seen


@pytest.mark.parametrize("columns", [0, COLUMNS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_are_those_of_one_after_the_other(dtype: torch.dtype, columns: int) -> None:
    mine, theirs = (
        results(work, columns, dtype, "cpu", 1)
        for work in (lambda x, first, second, left: frozen_feed_forward(x, first, second, left), one_after_the_other)
    )
    assert len(mine) == (7 if columns else 2)
    for one, two in zip(mine, theirs, strict=True):
        assert one.dtype == dtype and one.is_contiguous()
        assert float(two.float().abs().max()) > 0
    per_case = 3 if columns else 2  # the result, and the gradients of both inputs
    assert torch.equal(mine[0], theirs[0]), "the forward pass: the same bits"
    for one, two in zip(mine[1:per_case], theirs[1:per_case], strict=True):  # scales are folded in at another place
        assert float((one - two).float().norm()) <= 0.03 * float(two.float().norm())


def test_other_rows_on_the_left_are_refused_and_so_is_a_second_derivative() -> None:
    first, second = layers(COLUMNS, torch.float32)
    x = numbers(6, INPUTS).view(3, 2, INPUTS).requires_grad_()
    with pytest.raises(ValueError, match=r"\(2, 3, 16\) is left of \(3, 2, 32\)"):
        frozen_feed_forward(x, first, second, numbers(6, COLUMNS).view(2, 3, COLUMNS))
    y = frozen_feed_forward(x, first, second, numbers(6, COLUMNS).view(3, 2, COLUMNS))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_number_that_is_not_finite_is_seen() -> None:
    first, second = layers(0, torch.bfloat16)
    x = numbers(3, INPUTS, dtype=torch.bfloat16)
    x[1, 4] = float("nan")
    y = frozen_feed_forward(x, first, second)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradient_checkpointing_and_what_selective_stores(mode: str) -> None:
    first, second = layers(COLUMNS, torch.float32)
    x, left = numbers(6, INPUTS).requires_grad_(), numbers(6, COLUMNS, seed=1).requires_grad_()
    contexts = partial(checkpointing._contexts, mode, nullcontext)

    def block(x: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        return frozen_feed_forward(x, first, second, left)

    plain = torch.autograd.grad(block(x, left).square().mean(), (x, left))
    y = checkpoint(block, x, left, use_reentrant=False, context_fn=contexts)
    with Operations() as seen:
        again = torch.autograd.grad(y.square().mean(), (x, left))
    assert all(map(torch.equal, plain, again))
    # both of the forward pass are recomputed, or those that selective does not store (none)
    assert (seen.total("fp8_gradient"), seen.total("fp8_product")) == (2, 2 if mode == "full" else 0)


def test_selective_stores_the_narrow_product() -> None:
    wide, narrow = torch.empty(4 * INPUTS, INPUTS), torch.empty(INPUTS, 4 * INPUTS)
    operation = torch.ops.inweave.fp8_product.default
    policies = [
        checkpointing._policy(None, operation, weight[:1], None, weight, None, None, torch.float32, True)
        for weight in (wide, narrow)
    ]
    save, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert policies == [recompute, save]


def test_a_compiler_gets_rows_of_x_and_dy_in_plain_operations() -> None:
    torch._dynamo.reset()
    first, second = layers(COLUMNS, torch.float32)
    x, left = numbers(6, INPUTS).requires_grad_(), numbers(6, COLUMNS, seed=1).requires_grad_()
    graphs = Graphs()
    compiled = torch.compile(frozen_feed_forward, backend=graphs.backend, fullgraph=True)
    y, plain = compiled(x, first, second, left), frozen_feed_forward(x, first, second, left)
    assert torch.equal(y, plain)
    dy = numbers(6, OUTPUTS, seed=2)
    assert all(map(torch.equal, torch.autograd.grad(y, (x, left), dy), torch.autograd.grad(plain, (x, left), dy)))
    counts = {name: count for name in OPERATORS if (count := sum(n.op == "call_function" for n in graphs.calls(name)))}
    assert counts == {"fp8_product": 2, "fp8_gradient": 2, "gelu_rows": 1, "gelu_gradient_rows": 1}


def test_operator_contract() -> None:
    checks = ("test_autograd_registration", "test_faketensor")
    z, left = numbers(7, WIDTH, dtype=torch.bfloat16), numbers(7, COLUMNS, dtype=torch.bfloat16)
    d = numbers(7, COLUMNS + WIDTH, dtype=torch.bfloat16)
    for matrix in (None, left):
        torch.library.opcheck(torch.ops.inweave.gelu_rows, (z, matrix), test_utils=checks)
    for of_z, of_left in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.inweave.gelu_gradient_rows, (d, z, of_z, of_left), test_utils=checks)


# in models


ATTENTION = r".*(to_[qkv]|add_[qkv]_proj)"


def quantized(variant: str, monkeypatch: pytest.MonkeyPatch, targets: str = ATTENTION) -> tuple[Any, dict[str, Any]]:
    """Return a small model with fp8 feed-forward parts and output projections, on the path of compiled regions."""
    monkeypatch.setattr(select, "is_traced", lambda: True)
    transformer, inputs = network(variant, dtype=torch.float32, targets=targets)
    for name, module in list(transformer.named_modules()):
        if type(module) is nn.Linear and any(part in name for part in (".ff", "proj_mlp", "proj_out")):
            if "single" in name or ".ff" in name:
                Fp8Linear.quantize(module)
    return transformer, inputs


@pytest.mark.parametrize("variant", ["flux1-dev", "sd3.5-large"])
def test_models_call_it_where_nothing_is_between_the_layers(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, inputs = quantized(variant, monkeypatch)
    parts = sum(isinstance(module, FeedForward) for module in transformer.modules())
    single = len(getattr(transformer, "single_transformer_blocks", ()))
    plain = gradients(transformer, inputs)
    fuse_blocks(transformer)
    with Operations() as seen:
        again = gradients(transformer, inputs)
    assert parts and seen.total("gelu_rows") == seen.total("gelu_gradient_rows") == parts + single
    assert seen.total("tanh_gelu") == seen.total("fp8_linear") == 0
    assert_near(again, plain)
    restore_blocks(transformer)
    assert not any(type(module).__name__ == "FusedFeedForward" for module in transformer.modules())


def assert_near(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Rows that differ in a last bit may become the next number of e4m3."""
    assert mine.keys() == theirs.keys() and len(mine) > 10
    for name, one in mine.items():
        assert float((one - theirs[name]).norm()) <= 0.03 * float(theirs[name].norm()), name


@pytest.mark.parametrize("change", ["adapter", "hook", "dropout", "activation hook"])
def test_anything_in_between_takes_the_general_path(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = rf"{ATTENTION}|transformer_blocks\.0\.ff\.net\.2|single_transformer_blocks\.0\.proj_mlp"
    transformer, inputs = quantized("flux1-dev", monkeypatch, adapted if change == "adapter" else ATTENTION)
    block, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    expected = sum(isinstance(module, FeedForward) for module in transformer.modules()) + len(
        transformer.single_transformer_blocks
    )
    if change == "hook":
        block.ff.net[0].proj.register_forward_hook(lambda module, inputs, output: 1.5 * output)
        single.proj_out.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    elif change == "activation hook":
        block.ff.net[0].register_forward_hook(lambda module, inputs, output: 1.5 * output)
        single.act_mlp.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    elif change == "dropout":
        block.ff.net[1].p = 0.5
        block.ff.net[1].train()
        single.proj_mlp.bias.requires_grad_()
    original = copy.deepcopy(transformer)
    fuse_blocks(transformer)
    with Operations() as seen:
        torch.manual_seed(0)
        again = gradients(transformer, inputs)
    assert seen.total("gelu_rows") == expected - 2
    torch.manual_seed(0)
    assert_near(again, gradients(original, inputs))


def test_parts_that_are_replaced_after_fusing_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, inputs = quantized("flux1-dev", monkeypatch)
    original = copy.deepcopy(transformer)
    fuse_blocks(transformer)
    for each in (original, transformer):
        blocks, single = each.transformer_blocks, each.single_transformer_blocks
        blocks[0].ff.net[1] = nn.Identity()
        blocks[0].ff_context.net.append(nn.Tanh())
        blocks[1].ff.net[0].approximate = "none"
        single[0].act_mlp, single[1].act_mlp = nn.SiLU(), nn.GELU()
        for block in (*blocks, *single):  # large numbers, for which both kinds of GELU differ
            for layer in block.modules():
                if isinstance(layer, Fp8Linear):
                    layer.row_scales.mul_(3)
    assert_near(gradients(transformer, inputs), gradients(original, inputs))


def test_eager_code_has_the_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where full checkpointing does not compute the second product again."""
    transformer, inputs = quantized("flux1-dev", monkeypatch)
    monkeypatch.undo()
    fuse_blocks(transformer)
    with Operations() as seen:
        gradients(transformer, inputs)
    assert seen.total("gelu_rows") == 0 and seen.total("tanh_gelu") > 2


# the kernels


def interpreted() -> dict[str, list[str]]:
    """Compare the kernels with those of GELU and of rows, bit for bit, in a separate process.

    Triton's interpreter rounds to e4m3 wrongly, but in both of them.
    """
    from inweave.ops.activation import triton as activation
    from inweave.ops.fp8 import triton as kernel

    differing = {}
    for dtype in (torch.float16, torch.float32):
        for rows, width, columns in ((3, 48, 16), (2, 80, 0), (2, 3072, 768)):
            z, d = numbers(rows, width, dtype=dtype), numbers(rows, columns + width, seed=1, dtype=dtype)
            left = numbers(rows, columns, seed=2, dtype=dtype) if columns else None
            dz, dleft = activation.tanh_gelu_backward(d, z, True, left is not None)
            *gradient, mine = kernel.gelu_gradient_rows(d, z, left is not None)
            assert dz is not None
            assert mine is None if left is None else mine is not None and dleft is not None and torch.equal(mine, dleft)
            pairs = {"gelu": (kernel.gelu_rows(z, left), activation.tanh_gelu(z, left)), "gradient": (gradient, dz)}
            for name, ((q, scales), x) in pairs.items():
                expected, expected_scales = kernel.quantize_rows(x)
                different = ["q"] * (not torch.equal(q.float(), expected.float()))
                differing[f"{name} {rows}x{width}x{columns} {dtype}"] = different + ["scales"] * (
                    not torch.equal(scales, expected_scales)
                )
    return differing


def test_kernels_agree_with_one_after_the_other_in_the_interpreter() -> None:
    cases = run_interpreted(__name__)
    assert len(cases) == 12 and not any(cases.values()), cases


@pytest.mark.parametrize(("width", "columns"), [(12288, 3072), (9728, 0)], ids=["flux", "sd3.5-large"])
def test_kernels_compile_for_a_gpu_and_read_16_bytes_at_once(width: int, columns: int) -> None:
    from inweave.ops.fp8 import triton as kernel
    from inweave.ops.fp8.reference import LARGEST, SMALLEST
    from tests.unit.ops.compiling import compiled_code

    common = {"SMALL": SMALLEST, "LARGE": LARGEST, **kernel._parts(width, columns)}
    assert common["FIRST"] == 8192 and common["REST"] == (4096 if width == 12288 else 2048)
    for function, inputs, warps in (
        (kernel._gelu_row_kernel, 1, kernel._GELU_WARPS),
        (kernel._gelu_gradient_row_kernel, 2, kernel._GRADIENT_WARPS),
    ):
        code = compiled_code(function, common, warps=warps, aligned=True)
        assert len(code["cubin"]) > 1000
        at_once = 8 * 32 * warps  # numbers that its threads load in 16 bits, 16 bytes each
        own, left = common["FIRST"] // at_once + common["REST"] // at_once, common["LEFT"] // at_once
        assert code["ptx"].count("ld.global.v4.b32") == own * inputs + left > 1
