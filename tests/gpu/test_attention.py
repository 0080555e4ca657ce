"""Attention kernels on a GPU: right against float64, the same bits twice, and safe with every layout of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from inweave.ops.attention import attention, fixed_order, frontend_version, select  # noqa: E402
from inweave.ops.attention.kernels import KERNELS, deterministic_calls, sequence_first, strided_rows  # noqa: E402

#: (batch, heads, queries, keys, head size): SDXL's, SD 1.5's, Flux's, a ragged one, a text encoder's
SHAPES = [
    (1, 20, 1024, 1024, 64),
    (2, 10, 1024, 77, 64),
    (1, 8, 1024, 1024, 40),
    (1, 24, 640, 640, 128),
    (1, 3, 333, 129, 72),
    (1, 12, 77, 77, 64),
]


def inputs(shape: tuple[int, ...], dtype: Any = torch.bfloat16, layout: str = "sequence") -> list[Any]:
    batch, heads, queries, keys, size = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(batch, heads, rows, size) for rows in (queries, keys, keys, queries)]
    tensors = [torch.randn(size, generator=generator, device="cuda").to(dtype) for size in sizes]
    if layout == "columns":  # of a wider matrix, as the three projections of one product are
        wide = [
            torch.cat([tensor.transpose(1, 2).flatten(2)] * 3, -1)[..., heads * size : -heads * size]
            for tensor in tensors
        ]
        return [tensor.unflatten(-1, (heads, size)).transpose(1, 2) for tensor in wide]
    return [sequence_first(tensor) if layout == "sequence" else tensor for tensor in tensors]


def exact(q: Any, k: Any, v: Any, g: Any, causal: bool = False) -> list[Any]:
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel([SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=causal)
    return [out, *torch.autograd.grad(out, wide, g.double())]


def error(mine: Any, true: Any) -> float:
    return float((mine.double() - true).norm() / true.norm())


def needs_frontend() -> None:
    if frontend_version() is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")


#: float32 is for the efficient kernel alone
CASES = [(name, shape, dtype) for name in KERNELS for shape in SHAPES for dtype in (torch.bfloat16, torch.float16)]
CASES += [("efficient", shape, torch.float32) for shape in SHAPES]


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=str)
def test_a_kernel_is_as_exact_as_plain_torch(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v, g = inputs(shape, dtype)
    true = exact(q, k, v, g)
    plain = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel([SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(*plain)
    theirs = [out, *torch.autograd.grad(out, plain, g)]
    scale = q.shape[-1] ** -0.5
    if name == "cudnn-fixed-order":
        needs_frontend()
    try:
        result, lse = KERNELS[name].forward(q, k, v, False, scale)
    except RuntimeError as refusal:
        pytest.skip(f"{name} refuses {shape}: {str(refusal).splitlines()[0]}")
    mine = [result, *KERNELS[name].backward(g, q, k, v, sequence_first(result), lse, False, scale)]
    for one, other, truth in zip(mine, theirs, true, strict=True):
        assert error(one, truth) <= 2 * error(other, truth) + 1e-6


@pytest.mark.parametrize("shape", [(1, 20, 1024, 1024, 64), (1, 24, 4608, 4608, 128), (1, 10, 4096, 4096, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_attention_has_the_same_bits_every_time(shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v, g = inputs(shape, dtype)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    runs = []
    for _ in range(5):
        out = attention(*leaves, deterministic=True)
        runs.append([out, *torch.autograd.grad(out, leaves, g)])
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", list(KERNELS))
def test_causal_attention_of_a_kernel_is_as_exact_as_plain_torch(name: str) -> None:
    if name == "cudnn-fixed-order":
        needs_frontend()
    q, k, v, g = inputs((1, 12, 160, 160, 64))
    true = exact(q, k, v, g, causal=True)
    plain = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel([SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(plain[0], plain[1], plain[2], is_causal=True)
    theirs = [out, *torch.autograd.grad(out, plain, g)]
    result, lse = KERNELS[name].forward(q, k, v, True, 0.125)
    mine = [result, *KERNELS[name].backward(g, q, k, v, sequence_first(result), lse, True, 0.125)]
    for one, other, truth in zip(mine, theirs, true, strict=True):
        assert error(one, truth) <= 2 * error(other, truth) + 1e-6


SELF_ATTENTION = [(1, 20, 1024, 1024, 64), (1, 24, 4608, 4608, 128), (1, 38, 4429, 4429, 64)]


@pytest.mark.parametrize("shape", SELF_ATTENTION, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cudnn_in_a_fixed_order_repeats_its_bits_eagerly_and_recorded(
    shape: tuple[int, ...], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_frontend()
    q, k, v, g = inputs(shape, dtype, layout="columns")
    assert "cudnn-fixed-order" in select.measure(q, k, False, True)
    assert "cudnn-fixed-order" not in select.measure(q, k, False, False)
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_stored", dict)
    monkeypatch.setattr(select, "_store", lambda: None)
    monkeypatch.setattr(select, "_fastest", lambda *_: "cudnn-fixed-order")
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    runs = [torch.autograd.grad(attention(*leaves, deterministic=True), leaves, g) for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs.append(torch.autograd.grad(attention(*leaves, deterministic=True), leaves, g))
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for other in runs[1:]:
            assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


def test_what_needs_too_large_a_workspace_is_computed_by_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_frontend()
    monkeypatch.setattr(fixed_order, "MAX_WORKSPACE", 1 << 20)
    q, k, v, g = inputs((1, 20, 1024, 1024, 64))
    out, lse = KERNELS["cudnn-fixed-order"].forward(q, k, v, False, 0.125)
    with pytest.raises(RuntimeError, match="more than"):
        KERNELS["cudnn-fixed-order"].backward(g, q, k, v, sequence_first(out), lse, False, 0.125)
    assert set(select.measure(q, k, False, True)) == {"flash", "efficient"}


@pytest.mark.parametrize("queries", ["heads", "sequence", "columns"])
@pytest.mark.parametrize("grad", ["heads", "sequence"])
def test_cudnn_survives_every_pair_of_layouts(queries: str, grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sequence-first gradient and heads-first queries, cuDNN's backward pass read out of bounds (Flux)."""
    shape = (1, 24, 4608, 4608, 128)
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_stored", dict)
    monkeypatch.setattr(select, "_store", lambda: None)
    monkeypatch.setattr(select, "_fastest", lambda *_: "cudnn")
    leaves = [tensor.requires_grad_() for tensor in inputs(shape, layout=queries)[:3]]
    g = inputs(shape, layout=grad)[3]
    for _ in range(3):
        mine = torch.autograd.grad(attention(*leaves), leaves, g)
    torch.cuda.synchronize()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        theirs = torch.autograd.grad(functional.scaled_dot_product_attention(*leaves), leaves, g)
    for one, other in zip(mine, theirs, strict=True):
        assert error(one, other.double()) < 2e-2


@pytest.mark.parametrize("shape", [(2, 20, 1024, 1024, 64), (2, 10, 1024, 77, 64), (1, 38, 640, 640, 64)], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_columns_of_a_wider_matrix_are_read_where_they_are(name: str, shape: tuple[int, ...]) -> None:
    if name == "cudnn-fixed-order":
        needs_frontend()
    *columns, g = inputs(shape, layout="columns")
    *rows, _ = inputs(shape)
    assert strided_rows(columns[0]) is columns[0] and strided_rows(rows[0]) is rows[0]
    g, scale, results = sequence_first(g), shape[-1] ** -0.5, []
    for tensors in (columns, rows):
        with deterministic_calls(True):
            q, k, v = tensors
            out, lse = KERNELS[name].forward(q, k, v, False, scale)
            results.append([out, *KERNELS[name].backward(g, *tensors, sequence_first(out), lse, False, scale)])
    for one, other in zip(*results, strict=True):
        assert one.transpose(1, 2).is_contiguous()
        assert error(one, other.double()) < 1e-3


def test_the_fastest_kernel_is_chosen_once_and_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_chosen", {})
    q, k, *_ = inputs((1, 20, 1024, 1024, 64))
    times = select.measure(q, k, False, False)
    assert {"cudnn", "flash"} <= set(times)
    state = torch.cuda.get_rng_state()
    kernel = select.kernel_for(q, k, False, False)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert len(select._stored()) == 1
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "measure", lambda *_: pytest.fail("measured a second time"))
    assert select.kernel_for(q, k, False, False) is kernel


def test_it_can_be_captured_once_its_shape_is_known() -> None:
    q, k, v, g = inputs((1, 10, 1024, 77, 64))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    eager = torch.autograd.grad(attention(*leaves, deterministic=True), leaves, g)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        recorded = torch.autograd.grad(attention(*leaves, deterministic=True), leaves, g)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(eager, recorded, strict=True):
        assert error(one, other.double()) < 1e-3
    with deterministic_calls(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
