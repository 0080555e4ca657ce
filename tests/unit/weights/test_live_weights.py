"""A Weaver and a changing model: moves, ties, writes from outside, overflow, interrupts, hooks, fused layers."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import InweaveError, MergeStateError, TargetError
from inweave.formats.read import read
from inweave.weights import claims, gc_pause
from inweave.weights import weaver as weaver_module
from inweave.weights.source import DictSource, FileSource
from tests.support import random, sized, tensor


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(12, 8)
        self.lin = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lin(self.emb(ids)))


def pair(module: str, out: int, into: int, seed: int = 1, size: float = 1.0) -> dict[str, Any]:
    return {
        f"unet.{module}.lora_down.weight": random(seed, 2, into),
        f"unet.{module}.lora_up.weight": tensor((torch.arange(out * 2.0).reshape(out, 2) / out * size).numpy()),
    }


def lin(seed: int = 1) -> inweave.Adapter:
    return read({**pair("lin", 8, 8, seed), "unet.lin.diff_b": random(seed + 5, 8)})


def bits(net: nn.Module) -> dict[str, bytes]:
    state = net.state_dict()
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in state.items()}


def merged(base: dict[str, torch.Tensor], *stack: tuple[inweave.Adapter, float]) -> dict[str, torch.Tensor]:
    source = inweave.MergedSource(DictSource(base), list(stack), component="unet", index=inweave.index_of(Net()))
    return {name: source.get(name) for name in source.names()}


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def replace_parameter(net: Net) -> None:
    net.lin.weight = nn.Parameter(torch.randn(8, 8))


def replace_module(net: Net) -> None:
    net.lin = nn.Linear(8, 8)


def assign(net: Net) -> None:
    net.load_state_dict({name: torch.randn_like(value) for name, value in net.state_dict().items()}, assign=True)


def copy_in(net: Net) -> None:
    net.load_state_dict({name: torch.randn_like(value) for name, value in net.state_dict().items()})


def optimize(net: Net) -> None:
    with torch.no_grad():  # what optimizers do, without the seconds that importing one takes
        torch._foreach_add_(list(net.parameters()), 0.1)


def replace_data(net: Net) -> None:
    net.lin.weight.data = torch.randn(8, 8)


CONVERSIONS = {
    "to bfloat16": lambda net: net.to(torch.bfloat16),
    "half": lambda net: net.half(),
    "double": lambda net: net.double(),
    "deep copies of the data": lambda net: net._apply(lambda t: t.clone()),
}
NEW_WEIGHTS = {
    "a replaced parameter": replace_parameter, "a replaced module": replace_module,
    "load_state_dict(assign=True)": assign,
    "load_state_dict": copy_in, "an optimizer": optimize, "replaced data": replace_data,
}  # fmt: skip


@pytest.mark.parametrize("change", [*CONVERSIONS.values(), *NEW_WEIGHTS.values()], ids=[*CONVERSIONS, *NEW_WEIGHTS])
@pytest.mark.parametrize("woven_before", [False, True])
def test_weights_that_changed_without_adapters_are_the_base(change: Any, woven_before: bool) -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    if woven_before:
        weaver.apply([(lin(9), 1.0)])
        weaver.apply([])
    change(net)
    base, before = state(net), bits(net)
    assert weaver.apply([(lin(), 0.5)]) == 2
    for name, value in merged(base, (lin(), 0.5)).items():
        assert torch.equal(net.state_dict()[name], value), name
    weaver.apply([])
    assert bits(net) == before


@pytest.mark.parametrize("change", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_a_conversion_while_adapters_are_merged_in_is_followed(change: Any) -> None:
    net, plain = Net(), Net()
    weaver = inweave.Weaver(net)
    adapter = lin()
    weaver.apply([(adapter, 0.5)])
    change(net)
    change(plain)
    weaver.apply([(adapter, 0.5)])
    for name, value in merged(state(plain), (adapter, 0.5)).items():
        assert torch.equal(net.state_dict()[name], value), name
    assert weaver.apply([(adapter, 0.5)]) == 0
    weaver.apply([(lin(), 0.5), (lin(3), -1.0)])
    for name, value in merged(state(plain), (lin(), 0.5), (lin(3), -1.0)).items():
        assert torch.equal(net.state_dict()[name], value), name
    weaver.apply([])
    assert bits(net) == bits(plain)


@pytest.mark.parametrize("change", NEW_WEIGHTS.values(), ids=NEW_WEIGHTS.keys())
@pytest.mark.parametrize("stack", [[], [(lin(), 0.5)], [(lin(3), 1.0)]], ids=["none", "same", "other"])
def test_foreign_writes_over_merged_adapters_are_refused_by_name(change: Any, stack: Any) -> None:
    net = Net()
    original = bits(net)
    weaver = inweave.Weaver(net)
    weaver.apply([(lin(), 0.5)])
    change(net)
    before = bits(net)
    with pytest.raises(MergeStateError, match=r"lin\.weight.*modified outside the Weaver.*restore\(\)") as refusal:
        weaver.apply(stack)
    assert bits(net) == before and "new Weaver" not in str(refusal.value)
    with pytest.raises(MergeStateError, match="another Weaver"):  # it would take merged weights for the base
        inweave.Weaver(net).apply([(lin(), 0.5)])
    assert weaver.restore() == 2 and not weaver.woven  # the way out that the message names
    assert bits(net) == before | {name: original[name] for name in ("lin.weight", "lin.bias")}
    assert weaver.apply([(lin(), 0.5)]) == 2 and weaver.apply([]) == 2
    assert bits(net) == before | {name: original[name] for name in ("lin.weight", "lin.bias")}


def test_a_base_that_was_loaded_again_is_the_base() -> None:
    net = Net()
    base = state(net)
    weaver = inweave.Weaver(net)
    weaver.apply([(lin(), 0.5)])
    net.load_state_dict(base)
    assert weaver.apply([(lin(), 0.5)]) == 2
    weaver.apply([])
    assert all(torch.equal(value, base[name]) for name, value in net.state_dict().items())


def test_a_source_that_no_longer_holds_the_weights_is_not_believed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state(Net()), tmp_path / "base.safetensors")
    net = Net()
    with torch.no_grad():
        net.lin.weight.mul_(2)
    before = bits(net)
    weaver = inweave.Weaver(net, sources=FileSource(tmp_path / "base.safetensors"), keep="file")
    weaver.apply([(lin(), 0.5)])
    weaver.apply([])
    assert bits(net) == before


def test_weights_without_numbers_are_refused_by_name() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(TargetError, match=r"lin\.\w+: on the meta device"):
        inweave.Weaver(net).apply([(lin(), 1.0)])
    net = Net()
    net.lin.weight = nn.Parameter(torch.zeros(8, 1).expand(8, 8))
    with pytest.raises(TargetError, match=r"lin\.weight: an expanded view"):
        inweave.Weaver(net).apply([(lin(), 1.0)])


def test_a_model_that_went_to_the_meta_device_is_refused() -> None:
    net = Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(lin(), 1.0)])
    net.to("meta")
    with pytest.raises(TargetError, match=r"lin\.\w+: on the meta device"):
        weaver.apply([])


def test_offloaded_weights_are_written_where_the_hook_keeps_them() -> None:
    accelerate = pytest.importorskip("accelerate")
    ids = torch.tensor([1, 2])
    net, plain = Net(), Net()
    weaver, reference = inweave.Weaver(net), inweave.Weaver(plain)
    accelerate.cpu_offload(net, execution_device="cpu")
    assert net.lin.weight.is_meta
    for stack in ([(lin(), 0.5)], [(lin(3), 1.0)], []):
        assert weaver.apply(stack) == reference.apply(stack)
        assert torch.equal(net(ids), plain(ids))
    late = inweave.Weaver(net)
    late.apply([(lin(), 2.0)])
    reference.apply([(lin(), 2.0)])
    assert torch.equal(net(ids), plain(ids))


def test_a_model_offloaded_while_adapters_are_merged_in_gets_its_base_back() -> None:
    accelerate = pytest.importorskip("accelerate")
    ids = torch.tensor([1, 2])
    net, plain = Net(), Net()
    weaver = inweave.Weaver(net)
    weaver.apply([(lin(), 0.5)])
    accelerate.cpu_offload(net, execution_device="cpu")
    weaver.apply([])
    assert torch.equal(net(ids), plain(ids))


def test_weights_offloaded_to_disk_are_refused_by_name(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    net = Net()
    weaver = inweave.Weaver(net)
    accelerate.disk_offload(net, str(tmp_path), execution_device="cpu")
    with pytest.raises(TargetError, match=r"lin\.\w+: offloaded to disk"):
        weaver.apply([(lin(), 1.0)])


def test_a_model_made_in_inference_mode_is_woven() -> None:
    with torch.inference_mode():
        net = Net()
    weaver, plain = inweave.Weaver(net), Net()
    weaver.apply([(lin(), 1.0)])
    reference = inweave.Weaver(plain)
    reference.apply([(lin(), 1.0)])
    assert bits(net) == bits(plain)
    weaver.apply([])
    assert bits(net) == bits(Net())


# tied weights

EMB = read({"unet.emb.lora_embedding_A": random(1, 2, 12), "unet.emb.lora_embedding_B": random(2, 8, 2)})
HEAD = read(pair("head", 12, 8))


def views(net: Net) -> None:
    net.head.weight = nn.Parameter(net.emb.weight.detach().view(12, 8))


def by_data(net: Net) -> None:
    net.head.weight.data = net.emb.weight.data


TIES = {"one parameter": lambda net: setattr(net.head, "weight", net.emb.weight), "views": views, "data": by_data}


@pytest.mark.parametrize("tie", TIES.values(), ids=TIES.keys())
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("adapter", "name", "other"), [(HEAD, "head", "emb"), (EMB, "emb", "head")], ids=["head", "emb"]
)
def test_a_shared_tensor_is_refused_or_untied(tie: Any, late: bool, adapter: Any, name: str, other: str) -> None:
    net = Net()
    if not late:
        tie(net)
    weaver = inweave.Weaver(net)
    if late:
        tie(net)
    before = bits(net)
    assert any("tied" in line and f"{other}.weight" in line for line in weaver.plan(adapter).report.warnings)
    with pytest.raises(TargetError, match=rf"{name}\.weight: tied.*{other}\.weight.*untie=True"):
        weaver.apply([(adapter, 1.0)])
    assert bits(net) == before
    untying = inweave.Weaver(net, untie=True)
    weight = getattr(net, other).weight
    untying.apply([(adapter, 1.0)])
    assert getattr(net, other).weight is weight and bits(net)[f"{other}.weight"] == before[f"{other}.weight"]
    free = Net()
    free.head.weight = nn.Parameter(free.emb.weight.detach().clone())
    inweave.Weaver(free).apply([(adapter, 1.0)])
    assert bits(net) == bits(free)
    untying.apply([(EMB, 1.0), (HEAD, 0.5)])
    inweave.Weaver(free)
    untying.apply([])
    assert bits(net) == before


def test_both_of_a_tied_pair_at_once_keep_both_changes() -> None:
    net, free = Net(tied=True), Net()
    free.head.weight = nn.Parameter(free.emb.weight.detach().clone())
    stack = [(EMB, 1.0), (HEAD, 0.5)]
    inweave.Weaver(free).apply(stack)
    weaver = inweave.Weaver(net, untie=True)
    weaver.apply(stack)
    assert bits(net) == bits(free)


def test_a_module_under_two_names_is_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = self.first

    net = Twice()
    before = bits(net)
    weaver = inweave.Weaver(net)
    assert weaver.apply([(read(pair("first", 8, 8)), 1.0)]) == 1
    one = net.first.weight.detach().clone()
    assert weaver.apply([(read(pair("second", 8, 8)), 1.0)]) == 1
    assert torch.equal(net.first.weight, one)
    assert weaver.apply([(read(pair("first", 8, 8) | pair("second", 8, 8)), 1.0)]) == 1
    change = one.double() - torch.frombuffer(bytearray(before["first.weight"]), dtype=torch.float32).view(8, 8).double()
    torch.testing.assert_close(net.first.weight.double(), one.double() + change, atol=1e-6, rtol=0)
    weaver.apply([])
    assert bits(net) == before


# overflow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("before", [[], [(lin(3), 0.7)]], ids=["base", "woven"])
@pytest.mark.parametrize("strength", [1e39, -1e38, 1e300, 1e30])
def test_numbers_beyond_the_dtype_are_refused_and_nothing_changes(dtype: Any, before: Any, strength: float) -> None:
    net = Net().to(dtype)
    weaver = inweave.Weaver(net)
    weaver.apply(before)
    expected = bits(net)
    huge = read(pair("emb", 12, 8) | pair("lin", 8, 8) | pair("head", 12, 8, size=100))
    with pytest.raises(
        TargetError, match=r"the adapter at strength .*unet\.\w+\.weight.*would overflow.*lower strength"
    ):
        weaver.apply([(huge, strength), (lin(), 0.5)])
    assert bits(net) == expected
    assert weaver.woven == bool(before)
    assert weaver.apply(before) == 0
    weaver.apply([])
    assert bits(net) == bits(Net().to(dtype))


LARGEST = {
    torch.float16: 65504.0, torch.bfloat16: 1.8e19, torch.float32: 1.8e19, torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_sum_beyond_the_dtype_is_refused_where_each_adapter_fits(dtype: Any) -> None:
    """Formats without infinity too, where numbers that are too large become the largest one."""
    half = tensor([[LARGEST[dtype] * 0.6]] * 8)
    one, two = (
        read({"unet.lin.lora_down.weight": tensor([[1.0] * 8]), "unet.lin.lora_up.weight": half}) for _ in range(2)
    )
    net = Net()
    net.lin.weight.data = net.lin.weight.data.to(dtype)
    before, base = bits(net), state(net)
    weaver = inweave.Weaver(net)
    weaver.apply([(one, 1.0)])
    weaver.apply([(one, -3.0), (two, 3.5)])
    known = bits(net)
    for stack in ([(one, 1.0), (two, 1.0)], [(one, -1.0), (two, -1.0)], [(one, 2.0)]):
        with pytest.raises(TargetError, match=r"unet\.lin\.weight would overflow"):
            weaver.apply(stack)
        assert bits(net) == known
        source = inweave.MergedSource(DictSource(base), stack)
        with pytest.raises(TargetError, match=r"lin\.weight: the result would overflow"):
            source.get("lin.weight")
    weaver.apply([])
    assert bits(net) == before
    inweave.attach(net, one, name="one")
    inweave.merge(net)
    inweave.unmerge(net)
    inweave.set_strength(net, "one", 2.0)
    with pytest.raises(TargetError, match="cannot hold; nothing was changed"):
        inweave.merge(net)


def test_a_base_that_is_not_finite_itself_is_woven_as_it_is() -> None:
    net = Net()
    with torch.no_grad():
        net.lin.weight[0, 0] = float("inf")
    before = bits(net)
    weaver = inweave.Weaver(net)
    assert weaver.apply([(lin(), 0.5)]) == 2
    weaver.apply([])
    assert bits(net) == before


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_merged_source_refuses_numbers_beyond_the_dtype(dtype: Any) -> None:
    base = state(Net())
    source = inweave.MergedSource(DictSource(base), [(lin(), 1e7 if dtype else 1e39)], index=inweave.index_of(Net()))
    with pytest.raises(TargetError, match=r"lin\.weight: the result would overflow"):
        source.get("lin.weight", dtype=dtype)


# interrupts


@pytest.mark.parametrize("before", [[], [(lin(3), 0.7)]], ids=["base", "woven"])
@pytest.mark.parametrize("after", [[(lin(), 0.5)], []], ids=["other", "none"])
def test_an_interrupt_at_any_line_restores_or_is_known(before: Any, after: Any) -> None:
    """KeyboardInterrupt before every line that the swap executes, in all of its modules."""
    folder = str(Path(weaver_module.__file__).parent)
    net, swapped = Net(), Net()
    weaver = inweave.Weaver(net)
    base = bits(net)
    inweave.Weaver(swapped).apply(after)
    line, finished = 0, False
    while not finished:
        weaver.apply(before)
        lines = 0

        def trace(frame: FrameType, event: str, argument: object, stop: int = line) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.startswith(folder):
                return None
            if event == "line":
                lines += 1
                if lines > stop:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            weaver.apply(after)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)  # a trace can end a `with` before it leaves, which a signal cannot
            gc_pause._holders = 0
            gc.enable()
            for lock in (claims._lock, gc_pause._lock):  # another thread would wait for these for ever
                while lock._is_owned():  # type: ignore[attr-defined]
                    lock.release()
        assert weaver.woven or bits(net) == base, line
        if line % 2:
            weaver.apply(after)
            assert bits(net) == bits(swapped), line
        weaver.apply([])
        assert bits(net) == base, line
        line += sized(7, 1)
    assert line > 50


# fused projections


def attention_unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after", "woven"])
def test_fused_projections_are_woven_too(when: str) -> None:
    block = "down_blocks.1.attentions.0.transformer_blocks.0"
    tensors = (
        pair(f"{block}.attn1.to_q", 16, 16) | pair(f"{block}.attn2.to_k", 16, 8) | pair(f"{block}.attn1.to_v", 16, 16)
    )
    adapter, fused, plain = read(tensors), attention_unet(), attention_unet()
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 3, 8)
    base = state(fused)
    if when == "before":
        fused.fuse_qkv_projections()
    weaver, reference = inweave.Weaver(fused), inweave.Weaver(plain)
    if when == "woven":
        weaver.apply([(adapter, 3.0)])
    if when != "before":
        fused.fuse_qkv_projections()
    assert not any("to_qkv" in name for name in weaver.index.components["unet"].shapes) or when != "before"

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return fused(*inputs).sample, plain(*inputs).sample

    for stack in ([(adapter, 3.0)], [(adapter, -1.0)], []):
        weaver.apply(stack)
        reference.apply(stack)
        torch.testing.assert_close(*outputs(), atol=1e-5, rtol=1e-5)
    weaver.apply([(adapter, 3.0)])
    fused.unfuse_qkv_projections()
    reference.apply([(adapter, 3.0)])
    torch.testing.assert_close(*outputs(), atol=1e-5, rtol=1e-5)
    weaver.apply([])
    assert all(torch.equal(fused.state_dict()[name], value) for name, value in base.items())


def test_compiled_and_wrapped_modules_are_looked_into() -> None:
    net, plain = Net(), Net()
    net.lin = torch.compile(net.lin)  # type: ignore[assignment]
    wrapped: nn.Module = nn.DataParallel(torch.compile(net))  # type: ignore[type-var]
    inweave.Weaver(wrapped).apply([(lin(), 0.5)])
    inweave.Weaver(plain).apply([(lin(), 0.5)])
    assert torch.equal(cast(Any, net.lin)._orig_mod.weight, plain.lin.weight)


def test_a_weaver_of_something_without_weights_is_our_error() -> None:
    with pytest.raises(InweaveError, match="no floating-point weights"):
        inweave.Weaver(nn.Module())
