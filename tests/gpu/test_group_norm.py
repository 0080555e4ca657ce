"""Fused norms, activations and blocks on a GPU: against float64, twice the same bits, captured, in whole networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from tests.unit.models.test_fused_blocks import gradients, network  # noqa: E402
from tests.unit.ops import test_activation, test_group_norm, test_residual  # noqa: E402

from inweave.models.fused.blocks import fuse_blocks  # noqa: E402
from inweave.ops.activation import tanh_gelu  # noqa: E402
from inweave.ops.activation import triton as activation  # noqa: E402
from inweave.ops.group_norm import group_norm  # noqa: E402
from inweave.ops.group_norm import triton as images  # noqa: E402
from inweave.ops.residual import triton as residual  # noqa: E402
from inweave.ops.row_norm import triton as rows  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: (batch, channels, height, width, groups) of SDXL, at 1024 pixels and odd sizes
SDXL = [
    (1, 320, 128, 128, 32), (1, 960, 128, 128, 32), (2, 640, 128, 128, 32), (1, 640, 64, 64, 32), (4, 1280, 64, 64, 32),
    (1, 1920, 64, 64, 32), (1, 1280, 32, 32, 32), (4, 2560, 32, 32, 32), (3, 320, 104, 152, 32), (1, 1280, 13, 19, 32),
]  # fmt: skip
ROWS = [(4096, 640), (77, 2048), (4608, 3072), (1024, 1280), (49152, 64)]
#: (rows, width, left columns) of Flux's single and double blocks, SD 3.5 Large's, more rows than a grid's second axis
GELU = [(4608, 12288, 3072), (4096, 12288, 0), (512, 12288, 0), (4096, 9728, 0), (333, 9728, 0), (70_000, 16, 8)]
GELU_CASES = [(shape, dtype) for dtype in DTYPES for shape in (GELU if dtype == torch.bfloat16 else GELU[::5])]
#: all sizes in bf16, and some in the other dtypes: every width of a group is compiled by itself
IMAGE_CASES = [(shape, dtype) for dtype in DTYPES for shape in (SDXL if dtype == torch.bfloat16 else SDXL[::3])]
ROW_CASES = [(size, dtype) for dtype in DTYPES for size in (ROWS if dtype == torch.bfloat16 else ROWS[:3])]


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_kernels_are_as_exact_as_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 times as many examples and rows as in the interpreter: the largest error of a few numbers is random."""
    for sizes in ("IMAGES", "ROWS"):
        monkeypatch.setattr(
            test_group_norm, sizes, [(64 * count, *rest) for count, *rest in getattr(test_group_norm, sizes)]
        )
    for module, maker in ((test_group_norm, "image_inputs"), (test_group_norm, "row_inputs")):
        plain = getattr(module, maker)
        monkeypatch.setattr(module, maker, lambda *a, plain=plain, **k: on_gpu(plain(*a, **k)))
    made, images_and_biases = test_activation.inputs, test_residual.inputs
    monkeypatch.setattr(test_activation, "inputs", lambda *a: tuple(tensor.cuda() for tensor in made(*a)))

    def summands(*arguments: Any) -> tuple[Any, Any, list[Any]]:
        a, b, biases = images_and_biases(*arguments)
        return a.cuda(), b.cuda(), [bias.cuda() for bias in biases]

    monkeypatch.setattr(test_residual, "inputs", summands)
    assert test_group_norm.check_all(images, rows, [dtype]) >= 15
    assert test_activation.check_all(activation, [dtype]) > 1000
    few = [(64 * rows, width, columns) for rows, width, columns in test_activation.GELU_SHAPES]
    assert test_activation.check_gelu(activation, [dtype], few, "cuda") > 100_000
    assert test_activation.check_tails(activation, "cuda") > 100
    assert test_residual.check_all(residual, [dtype]) > 10_000


@pytest.mark.parametrize(("shape", "dtype"), IMAGE_CASES, ids=str)
def test_group_norm_of_sdxl_is_as_exact_as_torch_and_repeats_its_bits(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = on_gpu(test_group_norm.image_inputs(shape, dtype))
    silu, shifted = shape[1] != 640, shape[0] == 1
    test_group_norm.compare(
        lambda *a: test_group_norm.by_work(images, *a), test_group_norm.by_torch, inputs, silu, shifted
    )
    once, again = (test_group_norm.by_work(images, inputs, silu, shifted) for _ in range(2))
    for one, two in zip(once, again, strict=True):
        assert one is two is None or (one is not None and two is not None and torch.equal(one, two))


@pytest.mark.parametrize(("size", "dtype"), ROW_CASES, ids=str)
def test_row_norms_of_published_widths(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = on_gpu(test_group_norm.row_inputs(size, dtype))
    for rms in (False, True):
        test_group_norm.compare(
            lambda *a: test_group_norm.rows_by_work(rows, *a),
            test_group_norm.rows_by_torch,
            inputs,
            rms,
            size[1] == 640,
        )


@pytest.mark.parametrize(("shape", "dtype"), GELU_CASES, ids=str)
def test_gelu_of_published_widths_is_as_exact_as_torch_and_repeats_its_bits(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert test_activation.check_gelu(activation, [dtype], [shape], "cuda") == 2 * shape[0] * shape[1]
    x, left, dy = test_activation.gelu_inputs(shape, dtype, "cuda")
    once, again = ([activation.tanh_gelu(x, left), *activation.tanh_gelu_backward(dy, x, True, True)] for _ in range(2))
    for one, two in zip(once, again, strict=True):
        assert one is two is None or (one is not None and two is not None and torch.equal(one, two))


@pytest.mark.parametrize("shape", [GELU[0], GELU[3], (77, 40, 24)], ids=str)
def test_a_gelu_has_the_same_bits_compiled_and_recorded(shape: tuple[int, int, int]) -> None:
    x, left, dy = test_activation.gelu_inputs(shape, torch.bfloat16, "cuda")
    leaves = [each.requires_grad_() for each in (x, left) if each is not None]

    def work() -> list[torch.Tensor]:
        y = tanh_gelu(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    y = torch.compile(tanh_gelu, fullgraph=True, dynamic=False)(*leaves)
    compiled = [y, *torch.autograd.grad(y, leaves, dy)]
    assert all(torch.equal(one, two) for one, two in zip(compiled, work(), strict=True))
    del y, compiled  # whose graph of autograd belongs to another stream than the recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    with torch.no_grad():
        x.neg_()
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(recorded, work(), strict=True))


def test_a_recorded_norm_is_the_norm() -> None:
    i = on_gpu(test_group_norm.image_inputs((1, 320, 64, 64, 32), torch.bfloat16))
    x = i["x"].requires_grad_()

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        y = group_norm(x, i["weight"], i["bias"], 32, 1e-5, silu=True)
        return y, torch.autograd.grad(y, x, i["dy"])[0]

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(test_group_norm.values(*x.shape, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(recorded, work(), strict=True))


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_networks_train_as_the_plain_ones_do(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the plain network in float64: at most twice as far from it as the plain one in the same dtype."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, inputs = network(variant, torch.device("cuda"))
    truth = gradients(plain.double(), inputs)
    narrow = copy.deepcopy(plain).to(dtype)
    theirs = gradients(narrow, inputs)
    assert fuse_blocks(narrow) > 100
    mine = gradients(narrow, inputs)
    again = gradients(narrow, inputs)
    assert mine.keys() == theirs.keys() == truth.keys()

    def apart(results: dict[str, torch.Tensor]) -> float:
        gap = sum(float((results[name].double() - truth[name]).square().sum()) for name in truth if name != "output")
        return (gap / sum(float(truth[name].square().sum()) for name in truth if name != "output")) ** 0.5

    assert apart(mine) <= 2 * apart(theirs) + 1e-6, (apart(mine), apart(theirs))
    off, peer = (float((each["output"].double() - truth["output"]).norm()) for each in (mine, theirs))
    assert off <= 2 * peer + 1e-6
    assert apart(again) == pytest.approx(apart(mine), rel=0.1)
