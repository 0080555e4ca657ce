"""Weight sources: files mapped, checkpoints under their other names, strengths, and the bounded cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch import nn

from inweave.adapter import Tensor
from inweave.errors import FormatError, TargetError
from inweave.formats.read import read
from inweave.layers import attach, merge
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.resolve import resolve
from inweave.weights.checkpoint_files import Pieces, network_at
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource, FileSource, Renamed, Stacked, WeightSource
from inweave.weights.weaver import Weaver
from tests.support import random, summation_error, write

#: a Flux of two blocks and width 8, in BFL names
BFL = {
    "img_in.weight": (8, 4), "txt_in.weight": (8, 6), "final_layer.linear.weight": (4, 8),
    "final_layer.adaLN_modulation.1.weight": (16, 8), "final_layer.adaLN_modulation.1.bias": (16,),
    "double_blocks.0.img_attn.qkv.weight": (24, 8), "double_blocks.0.img_attn.qkv.bias": (24,),
    "double_blocks.0.img_attn.proj.weight": (8, 8), "double_blocks.0.img_mlp.0.weight": (32, 8),
    "double_blocks.0.img_attn.norm.query_norm.scale": (4,), "single_blocks.0.linear1.weight": (56, 8),
    "single_blocks.0.linear2.weight": (8, 40),
}  # fmt: skip


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_a_checkpoint_seen_under_its_other_names_and_back() -> None:
    original = numbers(BFL)
    component = component_from_names("unet", BFL)
    assert (component.table.name, component.naming) == ("flux", "original")
    renamed = Renamed(DictSource(original), component)
    qkv = original["double_blocks.0.img_attn.qkv.weight"]
    assert torch.equal(renamed.get("transformer_blocks.0.attn.to_k.weight"), qkv[8:16])
    assert torch.equal(
        renamed.get("single_transformer_blocks.0.proj_mlp.weight"), original["single_blocks.0.linear1.weight"][24:]
    )
    swapped = original["final_layer.adaLN_modulation.1.weight"]
    assert torch.equal(renamed.get("norm_out.linear.weight"), torch.cat([swapped[8:], swapped[:8]]))
    assert renamed.spec("transformer_blocks.0.attn.norm_q.weight").shape == (4,)
    diffusers = {name: renamed.get(name) for name in renamed.names()}
    back = Stacked(
        DictSource(diffusers), component_from_names("unet", {n: tuple(v.shape) for n, v in diffusers.items()})
    )
    assert set(back.names()) == set(original)
    for name, value in original.items():
        assert torch.equal(back.get(name), value), name
        assert back.spec(name).shape == tuple(value.shape)


def test_a_file_is_mapped_not_copied_and_unknown_names_are_named(tmp_path: Path) -> None:
    save_file(numbers(BFL), tmp_path / "flux.safetensors")
    source = FileSource(tmp_path / "flux.safetensors")
    one, two = source.get("img_in.weight"), source.get("img_in.weight")
    assert one.data_ptr() == two.data_ptr()
    assert source.get("img_in.weight", dtype=torch.float16).dtype == torch.float16
    with pytest.raises(TargetError, match="no_such"):
        source.get("no_such")


#: builds a network with a LoRA on every layer in a process of its own, and prints by how many bytes its peak grew
LOAD = """
import ctypes, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would round every tensor up to 2 MB
import torch
from torch import nn
import inweave
from inweave.targets.index import ModelIndex, component_from_names
from inweave.weights.source import FileSource
base, lora, layers, size, dtype = sys.argv[1:]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(int(layers)):
            self.add_module(f"layer{i}", nn.Linear(int(size), int(size), bias=False, dtype=getattr(torch, dtype)))
with torch.device("meta"):
    net = Net()
source = FileSource(base)
index = ModelIndex({"unet": component_from_names("unet", {n: source.spec(n).shape for n in source.names()})})
plan = inweave.resolve(inweave.load(lora), index)
warm = torch.ones(512, 512, dtype=source.spec("layer0.weight").dtype)  # libraries and threads, which stay
torch.addmm(warm.float(), warm.float(), warm.float()).to(getattr(torch, dtype))
merged = inweave.MergedSource(source, [(plan, 1.0)])
def high():  # unlike ru_maxrss, this does not remember the process that started us; mapped pages count
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
build = inweave.build
before = high()
build(net, merged)
print(high() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "target"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_a_merged_load_peaks_at_base_plus_adapter_plus_one_tensor(tmp_path: Path, stored: str, target: str) -> None:
    """The base in the model's dtype, the adapter, one tensor as float32, and 4 MB for the interpreter's own needs.

    Whatever the allocator: nothing large is allocated and freed, so it has nothing to retain.
    """
    layers, size, rank = 16, 2048, 8
    weights = {f"layer{i}.weight": torch.randn(size, size).to(getattr(torch, stored)) for i in range(layers)}
    save_file(weights, tmp_path / "base.safetensors")
    lora: dict[str, Tensor] = {}
    for i in range(layers):
        lora |= {
            f"unet.layer{i}.lora_down.weight": random(i, rank, size),
            f"unet.layer{i}.lora_up.weight": random(i, size, rank),
        }
    write(tmp_path / "lora.safetensors", lora)
    arguments = [tmp_path / "base.safetensors", tmp_path / "lora.safetensors", layers, size, target]
    result = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    base = layers * size * size * getattr(torch, target).itemsize
    adapter, one_tensor, allowance = (
        layers * 2 * rank * size * 4,
        size * size * 4,
        8 * 2**20,
    )  # pages of the allocator and of libraries; half a tensor
    assert base / 2 < int(result.stdout) < base + adapter + one_tensor + allowance


def test_rows_and_owned_memory_of_every_source(tmp_path: Path) -> None:
    """Each view gives the same values whole, by rows and owned; writing to an owned tensor changes nothing else."""
    shapes = {name: shape for name, shape in BFL.items() if len(shape) == 2}
    original = numbers(shapes)
    save_file(original, tmp_path / "flux.safetensors")
    file, component = FileSource(tmp_path / "flux.safetensors"), component_from_names("unet", shapes)
    parts = Renamed(file, component)
    opened = ExitStack()
    plan = resolve(read({"transformer.transformer_blocks.0.attn.to_k.lora_A.weight": random(1, 2, 8),
                         "transformer.transformer_blocks.0.attn.to_k.lora_B.weight": random(2, 8, 2)}),
                   ModelIndex({"unet": component}))  # fmt: skip
    merged = MergedSource(file, [(plan, 0.5)])
    sources: list[WeightSource] = [DictSource(original), file, parts, Stacked(parts, component), merged,
        Renamed(merged, component),
               MergedSource(DictSource(original), [(plan, 0.5)]),
               Pieces(network_at(tmp_path / "flux.safetensors"), opened)]  # fmt: skip
    with opened:
        for source in sources:
            for name in source.names():
                whole = source.get(name).clone()
                length = whole.shape[0] // 2
                torch.testing.assert_close(source.get(name, rows=(1, length)), whole[1 : 1 + length])
                half = source.get(name, dtype=torch.float16, rows=(1, length))
                torch.testing.assert_close(half, whole[1 : 1 + length].half())
                source.get(name, owned=True).zero_()
                source.get(name, rows=(0, length), owned=True).zero_()
                assert torch.equal(source.get(name), whole), (source, name)
    changed = merged.get("double_blocks.0.img_attn.qkv.weight") != original["double_blocks.0.img_attn.qkv.weight"]
    assert changed.any(1).tolist() == [8 <= row < 16 for row in range(24)]


def test_a_part_of_a_merged_weight_does_not_hold_the_rest(tmp_path: Path) -> None:
    original = numbers(BFL)
    component = component_from_names("unet", BFL)
    plan = resolve(read({"transformer.transformer_blocks.0.attn.to_k.lora_A.weight": random(1, 2, 8),
                         "transformer.transformer_blocks.0.attn.to_k.lora_B.weight": random(2, 8, 2)}),
                   ModelIndex({"unet": component}))  # fmt: skip
    parts = Renamed(MergedSource(DictSource(original), [(plan, 0.5)]), component)
    part = parts.get("transformer_blocks.0.attn.to_k.weight")
    assert part.untyped_storage().nbytes() == part.nbytes


def test_a_file_replaced_after_it_was_opened_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "flux.safetensors"
    save_file(numbers(BFL), path)
    source = FileSource(path)
    save_file({name: value + 1 for name, value in numbers(BFL).items()}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(FormatError, match="changed on disk"):
        source.get("img_in.weight", owned=True)
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read again"):
        source.get("img_in.weight", owned=True)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(10, 12), nn.Linear(12, 7, bias=False)
        self.conv = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.to(dtype)


def pairs(seed: int = 0) -> dict[str, Tensor]:
    return {
        "unet.first.lora_down.weight": random(seed, 3, 10), "unet.first.lora_up.weight": random(seed + 1, 12, 3),
        "unet.second.lora_down.weight": random(seed + 2, 2, 12), "unet.second.lora_up.weight": random(seed + 3, 7, 2),
        "unet.conv.lora_down.weight": random(seed + 4, 2, 6, 3, 3),
        "unet.conv.lora_up.weight": random(seed + 5, 8, 2, 1, 1),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merged_source_equals_inject_and_merge(dtype: torch.dtype) -> None:
    """Two roads to the same weights: merge while loading, and layers merged in a live model."""
    net = Net(dtype)
    base = {name: value.clone() for name, value in net.state_dict().items()}
    index = ModelIndex({"unet": component_from_names("unet", {n: tuple(v.shape) for n, v in base.items()})})
    source = MergedSource(DictSource(base), [(resolve(read(pairs()), index), 1.0)])
    attach(net, read(pairs()))
    merge(net)
    state = {name.replace(".base.", ".").replace(".base_layer.", "."): v for name, v in net.state_dict().items()}
    for name in base:
        merged = next(value for key, value in state.items() if key.endswith(name) and value.shape == base[name].shape)
        want = source.get(name)
        bound = torch.finfo(dtype).eps * want.float().abs() + summation_error(3, want.float().abs() + 1)
        assert bool(((merged.float() - want.float()).abs() <= bound).all()), name


def test_the_cache_is_bounded_in_bytes_and_drops_the_oldest(tmp_path: Path) -> None:
    net = Net()
    files = [write(tmp_path / f"{n}.safetensors", pairs(10 * n)) for n in range(6)]
    size = sum(len(tensor.data) for tensor in pairs().values())
    weaver = Weaver(net, keep="device", cache_bytes=3 * size)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for path in files:
        weaver.apply([(path, 1.0)])
        assert weaver._cache.bytes <= 3 * size
    assert len(weaver._cache) == 3
    weaver.apply([(files[0], 0.5)])
    weaver.apply([])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    net = Net()
    weaver = Weaver(net, keep="device")
    path = write(tmp_path / "a.safetensors", pairs(0))
    weaver.apply([(path, 1.0)])
    first = net.first.weight.clone()
    write(path, pairs(50))
    os.utime(path, ns=(1, 1))
    weaver.apply([(path, 1.0)])
    assert not torch.equal(net.first.weight, first)


def test_layers_of_an_unknown_model_are_saved_as_peft_and_injected_again(tmp_path: Path) -> None:
    import inweave

    net = inweave.inject(Net(), rank=3, alpha=6, targets=["first", "second"])
    for parameter in net.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    x = torch.randn(4, 10)
    before = net.second(net.first(x))
    inweave.save(inweave.collect(net), tmp_path / "peft", dialect="peft")
    again = inweave.attach(Net(), inweave.load(tmp_path / "peft"))
    torch.testing.assert_close(again.second(again.first(x)), before)
    with_index = inweave.save(inweave.collect(net), tmp_path / "candle.safetensors", dialect="candle")
    assert with_index.tensors == 4


def test_a_bias_created_on_some_rows_of_a_fused_weight() -> None:
    """A part's bias change on a base without biases: the created bias is as long as the fused weight."""
    shapes = {name: shape for name, shape in BFL.items() if not name.endswith("qkv.bias")}
    index = ModelIndex({"unet": component_from_names("unet", shapes)})
    change = random(3, 8)
    plan = resolve(read({"transformer.transformer_blocks.0.attn.to_k.diff_b": change}), index)
    source = MergedSource(DictSource(numbers(shapes)), [(plan, 0.5)])
    bias = source.get("double_blocks.0.img_attn.qkv.bias")
    assert bias.shape == source.spec("double_blocks.0.img_attn.qkv.bias").shape == (24,)
    assert not bias[:8].any()
    assert not bias[16:].any()
    torch.testing.assert_close(bias[8:16], 0.5 * torch.frombuffer(bytearray(change.data), dtype=torch.float32))
