"""Products in 8 bits on a GPU: the kernel against its formula, `_scaled_mm` against float64, and a run with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.gpu.test_training import settings  # noqa: E402
from tests.unit.models.test_fused_joint import gradients, network  # noqa: E402
from tests.unit.ops.test_fp8 import error_bound, numbers  # noqa: E402
from tests.unit.ops.test_fp8_feed_forward import ATTENTION, one_after_the_other, results  # noqa: E402
from torch import nn  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402

import inweave  # noqa: E402
from inweave.layers import lora_layers  # noqa: E402
from inweave.models.fused.blocks import fuse_blocks  # noqa: E402
from inweave.ops.activation import gelu_matrix, gelu_matrix_gradients  # noqa: E402
from inweave.ops.fp8 import frozen_feed_forward, quantize_rows, traced_rows  # noqa: E402
from inweave.ops.fp8.reference import quantize_rows as reference  # noqa: E402
from inweave.ops.quantized import fp8  # noqa: E402
from inweave.ops.quantized.fp8 import Fp8Linear  # noqa: E402
from inweave.training.execution.compilation import inductor_options  # noqa: E402
from inweave.training.execution.kernels import step_kernels  # noqa: E402
from inweave.training.session import prepare  # noqa: E402

if problems := Fp8Linear.device_problems(torch.device("cuda")):
    pytest.skip("; ".join(problems), allow_module_level=True)


@pytest.mark.parametrize("shape", [(1, 16), (77, 768), (4608, 3072), (3, 12288), (5, 15360), (3, 20000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gives_the_bits_of_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype=dtype).cuda()
    x[0, shape[1] // 2] = float("nan")
    if shape[0] > 2:
        x[1], x[2, 0] = 0, float("inf")
    for one, two in zip(quantize_rows(x), reference(x), strict=True):
        assert torch.equal(one.float().nan_to_num(-1e9), two.float().nan_to_num(-1e9))


@pytest.mark.parametrize(
    ("shape", "compiled"),
    [
        ((4608, 3072, 3072), False),
        ((512, 3072, 12288), False),
        *[(shape, compiled) for shape in ((77, 2048, 2048), (1, 2048, 4096)) for compiled in (False, True)],
    ],
    ids=str,
)
def test_products_are_within_the_errors_of_their_factors(shape: tuple[int, int, int], compiled: bool) -> None:
    rows, into, out = shape
    sizes = ((rows, into), (out, into), (rows, out))
    x, weight, dy = (numbers(*size, seed=seed, dtype=torch.bfloat16).cuda() for seed, size in enumerate(sizes))
    layer = nn.Linear(into, out, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.data = weight.clone()
    Fp8Linear.quantize(layer)
    assert isinstance(layer, Fp8Linear)
    x.requires_grad_()
    y = (torch.compile(layer, fullgraph=True) if compiled else layer)(x)
    y.backward(dy)
    assert x.grad is not None and y.dtype == x.grad.dtype == torch.bfloat16
    eager = layer(x)
    assert torch.equal(y, eager) and torch.equal(x.grad, torch.autograd.grad(eager, x, dy)[0]), "the same bits twice"

    def room(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Both errors and their product; 14 bits of fast accumulation over 128 terms at a time; the result in bf16."""
        big_a, big_b, off_a, off_b = a.double().abs(), b.double().abs(), error_bound(a), error_bound(b)
        whole = big_a @ big_b.T
        return big_a @ off_b.T + off_a @ big_b.T + off_a @ off_b.T + whole * (2.0**-7 + 2.0**-8)

    def folded_room() -> torch.Tensor:
        """The same for dy with the scales of the weight's rows, which are quantized along its inputs."""
        scales = layer.quantized[1].double()
        folded, off_w = dy.double() * scales.T, error_bound(weight) / scales
        big, off, own = folded.abs(), error_bound(folded), weight.double().abs() / scales
        return big @ off_w + off @ own + off @ off_w + (big @ own) * (2.0**-7 + 2.0**-8)

    plain = x.detach()
    assert (
        (y.detach().double() - plain.double() @ weight.double().T - layer.bias.double())
        .abs()
        .le(room(plain, weight) + 2.0**-8 * y.detach().double().abs())
        .all()
    )
    assert (
        (x.grad.double() - dy.double() @ weight.double())
        .abs()
        .le(folded_room() + 2.0**-8 * x.grad.double().abs())
        .all()
    )
    exact = plain.double() @ weight.double().T + layer.bias.double()
    typical = (y.detach().double() - exact).norm() / exact.norm()
    assert 0.005 < float(typical) < 0.06, "the error of 8 bits, no more and no less"


@pytest.mark.parametrize("shape", [(77, 768), (4608, 3072), (3, 12288), (5, 15360), (3, 20000)])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_compiler_gives_the_bits_of_the_kernel(shape: tuple[int, int], persistent: bool) -> None:
    """Whether it holds a row or reads it twice: the largest number is the same in any order."""
    x = numbers(*shape, dtype=torch.bfloat16).cuda()
    x[0, shape[1] // 2] = float("nan")
    x[1], x[2, 0] = 0, float("inf")
    # holds a row, or not
    options: Any = {"triton.multi_kernel": 2 if persistent else 3, "use_static_cuda_launcher": False}
    for one, two in zip(torch.compile(traced_rows, options=options)(x), quantize_rows(x), strict=True):
        assert torch.equal(one.float().nan_to_num(-1e9), two.float().nan_to_num(-1e9))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernel_that_makes_rows_quantizes_them(deterministic: bool) -> None:
    """A norm, a layer with a LoRA, GELU and a layer without, at Flux's widths: no quantizing kernels, same results."""
    model = nn.Sequential(
        nn.LayerNorm(3072, elementwise_affine=False),
        nn.Linear(3072, 12288),
        nn.GELU(approximate="tanh"),
        nn.Linear(12288, 3072),
    ).requires_grad_(False)
    model.to("cuda", torch.bfloat16)
    inweave.inject(model, rank=16, targets=["1"])
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
    for layer in (lora_layers(model)["1"].base, model[3]):
        Fp8Linear.quantize(cast("nn.Linear", layer))
    x = numbers(512, 3072, dtype=torch.bfloat16).cuda().requires_grad_()
    dy = numbers(512, 3072, seed=1, dtype=torch.bfloat16).cuda()
    inputs = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    assert len(inputs) == 3

    def results(work: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        y = work(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    compiled = torch.compile(model, fullgraph=True, options=inductor_options(deterministic=deterministic))
    traced, codes = run_and_get_code(results, compiled)
    assert all(map(torch.equal, traced, results(compiled))), "the same bits twice"
    for one, two in zip(traced, results(model), strict=True):
        # rows that were not rounded to 16 bits before: some numbers become the next one of e4m3
        assert float((one.double() - two.double()).norm() / two.double().norm()) < 0.04
    text = "\n".join(codes)
    counts = [text.count(f"fp8_{name}.default(") for name in ("product", "gradient", "linear")]
    assert counts == [1, 1, 0]
    launches = re.findall(r"^\s+(?:multi_kernel|triton)\w*\.run\(", text, re.MULTILINE)
    assert len(launches) == 5, (
        "forward the norm and GELU, backward dy, GELU and the norm: all but the last write rows in 8 bits"
    )


@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(4608, 12288, 3072), (512, 12288, 0), (77, 9728, 0), (3, 16384, 0), (5, 16384, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_into_rows_has_the_bits_of_one_after_the_other(
    rows: int, width: int, columns: int, dtype: torch.dtype
) -> None:
    """The last one is wider than a program holds, and is one after the other."""
    z, d = (numbers(rows, size, seed=size, dtype=dtype).cuda() for size in (width, columns + width))
    left = numbers(rows, columns, seed=1, dtype=dtype).cuda() if columns else None
    z[0, 3], d[1, columns + 5], z[2, 7] = float("nan"), float("inf"), float("inf")
    dz, dleft = gelu_matrix_gradients(d, z, True, left is not None)
    operators = torch.ops.inweave
    mine = [*operators.gelu_rows(z, left), *operators.gelu_gradient_rows(d, z, True, left is not None)]
    assert dz is not None
    expected = [*quantize_rows(gelu_matrix(z, left)), *quantize_rows(dz)]
    for one, two in zip(mine, expected, strict=False):
        assert torch.equal(one.float().nan_to_num(-1e9), two.float().nan_to_num(-1e9))
    if dleft is not None:
        assert torch.equal(mine[4].nan_to_num(-1e4), dleft.nan_to_num(-1e4))
    no_rows, _, dleft_again = operators.gelu_gradient_rows(d, z, False, left is not None)
    assert no_rows.numel() == 0 and (dleft is None or torch.equal(dleft_again.nan_to_num(-1e4), dleft.nan_to_num(-1e4)))


@pytest.mark.parametrize("columns", [0, 3072])
def test_two_frozen_layers_give_the_results_of_one_after_the_other(columns: int) -> None:
    """At 64 times the sizes of the test on a CPU: 2048 to 4096 and 3072 columns."""
    mine, theirs = (
        results(work, columns, torch.bfloat16, "cuda", 64)
        for work in (lambda x, first, second, left: frozen_feed_forward(x, first, second, left), one_after_the_other)
    )
    assert mine and torch.equal(mine[0], theirs[0]), "the forward pass has the same bits"
    for one, two in zip(mine, theirs, strict=True):  # the scales of a weight are multiplied at another place
        assert float((one - two).float().norm()) <= 0.03 * float(two.float().norm())


def in_a_step(transformer: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with step_kernels(torch.device("cuda"), deterministic=False):
        return gradients(transformer, inputs)


def test_compiled_blocks_call_the_feed_forward_operators() -> None:
    """In blocks of Flux whose layers in 8 bits have no adapters: no further from 16 bits than eager code is.

    With the kernels of a step: torch's own choice of attention reads out of bounds here (`inweave.ops.attention`).
    """
    transformer, inputs = network("flux1-dev", torch.device("cuda"), torch.bfloat16, ATTENTION)
    truth = in_a_step(transformer, inputs)
    for name, module in list(transformer.named_modules()):
        if type(module) is nn.Linear and (".ff" in name or "single" in name) and "norm" not in name:
            Fp8Linear.quantize(module)
    fuse_blocks(transformer)
    eager = in_a_step(transformer, inputs)
    for blocks in (transformer.transformer_blocks, transformer.single_transformer_blocks):
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False, options=inductor_options(deterministic=False))
    compiled, codes = run_and_get_code(in_a_step, transformer, inputs)
    text = "\n".join(codes)
    assert "gelu_rows.default(" in text and "gelu_gradient_rows.default(" in text and "tanh_gelu.default(" not in text

    def distance(mine: dict[str, torch.Tensor], names: list[str]) -> float:
        return sum(float((mine[name].double() - truth[name].double()).square().sum()) for name in names) ** 0.5

    for names in (["output"], [name for name in truth if name != "output"]):
        assert 0 < distance(compiled, names) < 1.5 * distance(eager, names)


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_a_run_with_a_quantized_base(compile_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model is narrow: its layers are quantized for the test alone."""
    monkeypatch.setattr(fp8, "SMALLEST_SIDE", 16)
    common = {
        "precision": "bf16",
        "steps": 20,
        "graph": "on",
        "deterministic": True,
        "compile": compile_,
        "targets": "attention-mlp",
    }
    plain = inweave.train(settings(tmp_path / "plain", tmp_path / "cache", **common))
    losses = []
    for name in ("one", "two"):
        records: list[Mapping[str, Any]] = []
        run, _ = prepare(settings(tmp_path / name, tmp_path / "cache", quantize="fp8", **common))
        result = run.train(on_record=records.append)
        events = [record.get("event") for record in records]
        assert "quantize" in events and "graph failed" not in events and "compile failed" not in events, records
        losses.append(result.losses)
    assert losses[0] == losses[1], "the same bits twice"
    assert losses[0] == pytest.approx(plain.losses, rel=0.1) and losses[0] != plain.losses
