"""Attention as one operation: the formula, its gradients, the mode that calls it, and the memory of choices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from inweave.ops.attention import MeasuredAttention, attention, fixed_order, select
from inweave.ops.attention.kernels import KERNELS, PLAIN, Kernel, strided_rows
from inweave.training.execution.kernels import attention_to_keep, deterministic_hints, step_kernels
from inweave.training.memory.checkpointing import _STORED


def inputs(dtype: Any, keys: int = 9, size: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 17, size), (2, 3, keys, size), (2, 3, keys, size))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("causal", "scale"), [(False, None), (False, 0.3), (True, None)])
def test_the_formula_and_its_gradients_are_torchs(causal: bool, scale: float | None) -> None:
    q, k, v = inputs(torch.float64, keys=17 if causal else 9)
    ours = attention(q, k, v, causal=causal, scale=scale)
    theirs = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pairs = zip(
        (ours, *torch.autograd.grad(ours, (q, k, v), grad)),
        (theirs, *torch.autograd.grad(theirs, (q, k, v), grad)),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_results_and_gradients_lie_sequence_first_whatever_comes_in() -> None:
    q, k, v = inputs(torch.float32)
    out = attention(q, k.detach().mT.contiguous().mT.requires_grad_(), v)
    assert out.transpose(1, 2).is_contiguous()
    (grad,) = torch.autograd.grad(out.sum(), (q,))
    assert grad.transpose(1, 2).is_contiguous()


def test_the_operation_obeys_the_rules_of_compilers() -> None:
    q, k, v = inputs(torch.float32)
    torch.library.opcheck(torch.ops.inweave.attention, (q, k, v, False, 0.25, False))


def test_the_mode_replaces_what_it_serves_and_nothing_else() -> None:
    names: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = (tensor.detach() for tensor in inputs(torch.float32))
    mask = torch.zeros(17, 9)
    with MeasuredAttention(device_type="cpu"), Spy():
        functional.scaled_dot_product_attention(q, k, v)
        assert names.count("inweave.attention.default") == 1
        functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        functional.scaled_dot_product_attention(query=q, key=k[:, :1], value=v[:, :1], enable_gqa=True)
        functional.scaled_dot_product_attention(q[..., :12], k[..., :12], v[..., :12])
        functional.scaled_dot_product_attention(q[0], k[0], v[0])
    assert names.count("inweave.attention.default") == 1
    with MeasuredAttention(), Spy():  # of a GPU
        functional.scaled_dot_product_attention(q, k, v)
    assert names.count("inweave.attention.default") == 1


def test_compiled_regions_contain_the_operation() -> None:
    q, k, v = inputs(torch.float32)

    def block(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 17, 48) * 2

    with MeasuredAttention(device_type="cpu"):
        graph = torch._dynamo.explain(block)(q, k, v).graphs[0]
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v)
    assert any("inweave.attention" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(compiled, block(q, k, v))
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), (q,))[0] for out in (compiled, block(q, k, v))))


def test_what_is_recomputed_is_the_same_operation() -> None:
    q, k, v = inputs(torch.float32)

    def context() -> tuple[Any, Any]:
        return MeasuredAttention(device_type="cpu"), MeasuredAttention(device_type="cpu")

    out = checkpoint(functional.scaled_dot_product_attention, q, k, v, use_reentrant=False, context_fn=context)
    plain = functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(*(torch.autograd.grad(result.sum(), (v,))[0] for result in (out, plain)))
    assert "attention" in _STORED


def test_other_devices_keep_torchs_attention() -> None:
    before = torch.backends.cudnn.deterministic
    with step_kernels(torch.device("cpu"), deterministic=True):
        assert torch.backends.cudnn.deterministic == before
        assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "b": "no such kernel"}', "\x00" * 10])
def test_a_broken_memory_of_choices_is_no_choice(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    select.cache_file().parent.mkdir()
    select.cache_file().write_text(text)
    assert select._stored() == {}


def test_a_runs_record_comes_first_and_gets_what_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_chosen", {"known": "cudnn", "both": "cudnn"})
    record = {"both": "efficient"}
    with select.recorded_choices(record):
        assert select._choose("both", lambda: pytest.fail("recorded"), "flash") == "efficient"
        assert select._choose("known", lambda: pytest.fail("known"), "flash") == "cudnn"
        assert select._choose("new", lambda: "flash", "efficient") == "flash"
        assert select._choose("captured", None, "flash") == "flash", "nothing is measured while a graph is recorded"
        with select.recorded_choices({}):
            assert select._choose("both", None, "flash") == "cudnn"
    assert record == {"both": "efficient", "known": "cudnn", "new": "flash", "captured": "flash"}
    assert select._stored() == {"both": "cudnn", "known": "cudnn", "new": "flash"}, "a run's record is its own"
    assert select._choose("both", None, "flash") == "cudnn"


def test_choices_are_remembered_beside_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    select.cache_file().parent.mkdir()
    select.cache_file().write_text(json.dumps({"another GPU": "efficient"}))
    monkeypatch.setattr(select, "_chosen", {"this GPU": "cudnn"})
    select._store()
    assert select._stored() == {"another GPU": "efficient", "this GPU": "cudnn"}
    assert set(KERNELS) == {"cudnn", "flash", "efficient", "cudnn-fixed-order"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    (tmp_path / "a file").write_text("")
    select._store()  # nowhere to write: another measurement next time


def test_columns_of_one_product_are_not_copied() -> None:
    packed = torch.randn(2, 6, 3 * 4 * 8, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in packed.unflatten(-1, (3, 4, 8)).unbind(2))
    assert strided_rows(q) is q and strided_rows(v) is v
    apart = [tensor.detach().contiguous().requires_grad_() for tensor in (q, k, v)]
    assert strided_rows(apart[0]).data_ptr() != apart[0].data_ptr()  # heads-first: reordered
    ours, theirs = attention(q, k, v), attention(*apart)
    torch.testing.assert_close(ours, theirs)
    (one,) = torch.autograd.grad(ours.square().sum(), packed)
    others = torch.autograd.grad(theirs.square().sum(), apart)
    torch.testing.assert_close(one, torch.stack([other.transpose(1, 2) for other in others], 2).flatten(2))


def test_what_memory_was_too_short_for_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(select, "_chosen", {})
    monkeypatch.setattr(select, "_unmeasured", set())
    assert select._choose("short", lambda: None, "flash") == "flash"
    assert select._choose("short", lambda: pytest.fail("again in one process"), "flash") == "flash"
    assert select._choose("long", lambda: "plain", "flash") == "plain"
    assert select._stored() == {"long": "plain"}


def test_bits_that_have_to_repeat_are_never_those_of_a_kernel_whose_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 2, 4, 8)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(select, "measure", lambda *_: {})
    assert select._fastest(q, q, False, True) == "plain"
    assert select._fastest(q, q, False, False) == "efficient"

    def short(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(select, "measure", short)
    assert select._fastest(q, q, False, True) is None


def test_which_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for deterministic runs is excluded from other runs, one whose bits differ from deterministic runs."""
    runs: list[int] = []

    def another_order(*inputs: Any) -> tuple[Any, ...]:
        runs.append(1)
        return tuple(grad + 1e-3 * len(runs) for grad in PLAIN.backward(*inputs))

    kernels = {"plain": PLAIN, "fixed": PLAIN._replace(repeats_only=True), "any": Kernel(PLAIN.forward, another_order)}
    monkeypatch.setattr(select, "KERNELS", kernels)
    monkeypatch.setattr(select, "_milliseconds", lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    q, k, _ = (tensor.detach() for tensor in inputs(torch.float32))
    assert set(select.measure(q, k, False, False)) == {"plain", "any"}
    assert set(select.measure(q, k, False, True)) == {"plain", "fixed"}


@pytest.fixture
def fresh_frontend() -> Iterator[None]:
    fixed_order.frontend_problem.cache_clear()
    yield
    fixed_order.frontend_problem.cache_clear()


def fake_package(monkeypatch: pytest.MonkeyPatch, version: str | None, **functions: Any) -> None:
    monkeypatch.setattr(fixed_order, "frontend_version", lambda: version)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(**functions))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def missing_library() -> int:
    raise AssertionError("Found 2 libcudnn.so.x")  # the package asserts where it is imported


UNUSABLE = {
    "which is not installed": (None, {}, 'pip install "inweave\\[deterministic\\]"'),
    "which cannot be imported": ("1.32.0", {"backend_version": missing_library}, "AssertionError: Found 2 libcudnn"),
    "another module of its name": ("1.32.0", {}, "AttributeError"),
    "with another cuDNN": ("1.32.0", {"backend_version": lambda: 90100}, "cuDNN 90100, and torch has 91900"),
}


@pytest.mark.parametrize(("version", "functions", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_package_that_cannot_be_used_is_left_out(
    version: str | None,
    functions: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    fresh_frontend: None,
) -> None:
    """It is refused like a shape, the log says why, and choices are not those that were made where it can be used."""
    fake_package(monkeypatch, version, **functions)
    q, k, v = (tensor.detach().bfloat16() for tensor in inputs(torch.float32))
    out, lse = PLAIN.forward(q, k, v, False, 0.25)
    with pytest.raises(RuntimeError, match=f"needs nvidia-cudnn-frontend.*{text}"):
        KERNELS["cudnn-fixed-order"].backward(out, q, k, v, out, lse, False, 0.25)
    assert re.search(text, deterministic_hints(torch.bfloat16)[0])
    assert not deterministic_hints(torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert "frontend" not in select._machine.__wrapped__(0, True)


def test_a_package_that_can_be_used_needs_no_hint(monkeypatch: pytest.MonkeyPatch, fresh_frontend: None) -> None:
    fake_package(monkeypatch, "1.32.0", backend_version=lambda: 91900)
    assert fixed_order.frontend_problem() is None and not deterministic_hints(torch.bfloat16)


def test_whatever_cudnns_package_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch, fresh_frontend: None) -> None:
    """Its exceptions have no kind in common; a kernel that refuses raises RuntimeError, and others are measured."""

    def execute(*_: Any, **__: Any) -> None:
        raise ValueError("the variant pack is missing a buffer")

    fake_package(monkeypatch, "1.32.0", backend_version=lambda: 91900, set_stream=lambda **_: None)
    monkeypatch.setattr(fixed_order, "_graph", lambda *_: fixed_order._Graph(execute, tuple("qkvogldef"), 0))
    monkeypatch.setattr(fixed_order, "_handle", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    q, k, v = (tensor.detach().bfloat16() for tensor in inputs(torch.float32))
    out, lse = PLAIN.forward(q, k, v, False, 0.25)
    with pytest.raises(RuntimeError, match="missing a buffer"):
        fixed_order.fixed_order_backward(out, q, k, v, out, lse, False, 0.25)


def test_cudnns_graphs_live_as_long_as_cuda_graphs_may_launch_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "_build", lambda *key: object())
    fixed_order._graph.cache_clear()
    try:
        graphs = [fixed_order._graph(0, (), False, float(number)) for number in range(600)]
        assert all(fixed_order._graph(0, (), False, float(number)) is graph for number, graph in enumerate(graphs))
    finally:
        fixed_order._graph.cache_clear()


def test_a_resumed_run_notices_the_package_only_where_bits_have_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(select, "frontend_version", lambda: "1.32.0")
    monkeypatch.setattr(select, "frontend_problem", lambda: "not installed")
    select._machine.cache_clear()
    device = torch.device("cuda", 0)
    recorded = {f"{select.machine_name(device, on)}: bfloat16 1x1x8x8x8": "flash" for on in (False, True)}
    monkeypatch.setattr(select, "frontend_problem", lambda: None)  # it was installed since
    select._machine.cache_clear()
    try:
        assert attention_to_keep(recorded, device, deterministic=False) == (recorded, [])
        choices, notes = attention_to_keep(recorded, device, deterministic=True)
        assert choices == recorded and "frontend 1.32.0: results differ" in notes[0]
    finally:
        select._machine.cache_clear()


def test_choices_are_made_for_a_machine_and_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(select, "frontend_version", lambda: "1.32.0")
    names = []
    for problem in ("it is not installed", None):
        monkeypatch.setattr(select, "frontend_problem", lambda problem=problem: problem)
        names.append(select._machine.__wrapped__(0, True))
    assert names[1] == f"{names[0]}, frontend 1.32.0"
    assert select._machine.__wrapped__(0, False) == names[0]
