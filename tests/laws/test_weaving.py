"""Laws of weaving: live weights equal MergedSource, and the base always comes back bit for bit."""

from __future__ import annotations

import itertools
import random as stdlib_random
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from inweave.adapter import Adapter, Tensor
from inweave.errors import ConfigError, FormatError, TargetError
from inweave.formats.read import read
from inweave.ops.delta import change
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.resolve import resolve
from inweave.weights.build import build
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource, FileSource
from inweave.weights.stack import Strength
from inweave.weights.weaver import Weaver
from inweave.weights.writer import Writer
from tests.support import random, sized, tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Net(nn.Module):
    """Linear, convolutions, an embedding and a norm, under plain names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(10, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.conv = nn.Conv2d(6, 8, 3, padding=1)
        self.point = nn.Conv2d(8, 6, 1)
        self.norm = nn.LayerNorm(12)
        self.table = nn.Embedding(9, 12)
        self.to(dtype)


def index_of(net: nn.Module) -> ModelIndex:
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    return ModelIndex({"unet": component_from_names("unet", shapes)})


def adapter(seed: int, kinds: tuple[str, ...] = ("lora", "conv", "lokr", "dora", "diff", "loha", "norm")) -> Adapter:
    """A mixed adapter of random numbers for `Net`."""
    tensors: dict[str, Tensor] = {}
    if "lora" in kinds:
        tensors |= {
            "unet.first.lora_down.weight": random(seed, 3, 10),
            "unet.first.lora_up.weight": random(seed + 1, 12, 3),
            "unet.first.alpha": tensor(2.0),
        }
    if "conv" in kinds:
        tensors |= {
            "unet.conv.lora_down.weight": random(seed + 2, 2, 6, 3, 3),
            "unet.conv.lora_up.weight": random(seed + 3, 8, 2, 1, 1),
        }
    if "lokr" in kinds:
        tensors |= {"unet.point.lokr_w1": random(seed + 4, 2, 2), "unet.point.lokr_w2": random(seed + 5, 3, 4)}
    if "dora" in kinds:
        tensors |= {
            "unet.second.lora_down.weight": random(seed + 6, 2, 12),
            "unet.second.lora_up.weight": random(seed + 7, 12, 2),
            "unet.second.dora_scale": tensor(abs(random_numbers(seed, 12, 1)) + 0.5),
        }
    if "diff" in kinds:
        tensors |= {"unet.first.diff_b": random(seed + 8, 12)}
    if "loha" in kinds:
        tensors |= {
            f"unet.table.hada_{role}": random(seed + 9, *shape)
            for role, shape in (("w1_a", (9, 2)), ("w1_b", (2, 12)), ("w2_a", (9, 2)), ("w2_b", (2, 12)))
        }
    if "norm" in kinds:
        tensors |= {"unet.norm.w_norm": random(seed + 10, 12), "unet.norm.b_norm": random(seed + 11, 12)}
    result = read(tensors)
    assert not result.problems
    return result


def random_numbers(seed: int, *shape: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(seed).standard_normal(shape)


def bits(net: nn.Module) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in net.state_dict().items()
    }


def source_of(net: nn.Module) -> DictSource:
    return DictSource({name: value.detach().clone() for name, value in net.state_dict().items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_source_is_the_formula_rounded_once(dtype: torch.dtype) -> None:
    net = Net(dtype)
    base, index = source_of(net), index_of(net)
    plans = [resolve(adapter(seed), index) for seed in (1, 50)]
    merged = MergedSource(base, [(plans[0], 0.7), (plans[1], -0.4)])
    wide: dict[str, torch.Tensor] = {name: base.get(name).double() for name in base.names()}
    for plan, strength in zip(plans, (0.7, -0.4), strict=True):
        for placement in plan.placements:
            wide[placement.tensor] = wide[placement.tensor] + change(
                placement.factors, base.get(placement.tensor).double(), strength
            ).reshape(wide[placement.tensor].shape)
    for name, exact in wide.items():
        got = merged.get(name)
        assert got.dtype == dtype
        ulp = torch.finfo(dtype).eps * exact.abs().clamp_min(torch.finfo(dtype).tiny)
        # one rounding is half an ulp; float32 accumulation may add as much again
        assert ((got.double() - exact).abs() <= ulp + 1e-6 * exact.abs().max()).all(), name


def test_untouched_tensors_are_not_even_copied(tmp_path: Path) -> None:
    net = Net()
    save_file({k: v.clone() for k, v in net.state_dict().items()}, tmp_path / "base.safetensors")
    base = FileSource(tmp_path / "base.safetensors")
    merged = MergedSource(base, [(resolve(adapter(1, ("lora",)), index_of(net)), 1.0)])
    assert merged.get("second.weight").data_ptr() == base.get("second.weight").data_ptr()
    assert merged.get("first.weight").data_ptr() != base.get("first.weight").data_ptr()


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_steps_and_the_base_is_back(dtype: torch.dtype) -> None:
    net = Net(dtype)
    before, base = bits(net), source_of(net)
    addresses = {name: value.data_ptr() for name, value in net.state_dict().items()}
    weaver = Weaver(net, keep="device")
    adapters = [adapter(seed) for seed in (1, 30, 60)] + [adapter(90, ("lora", "conv")), adapter(120, ("dora", "norm"))]
    plans = [resolve(a, weaver.index) for a in adapters]
    chance = stdlib_random.Random(7)
    for step in range(1000):
        chosen = chance.sample(range(len(adapters)), chance.randint(0, 3))
        stack = [(adapters[i], chance.choice([-1.5, -0.2, 0.0, 0.3, 1.0, 2.5])) for i in chosen]
        weaver.apply(stack)
        if step % 97 == 0:
            want = MergedSource(base, [(plans[adapters.index(a)], s) for a, s in stack])
            for name, value in net.state_dict().items():
                assert torch.equal(value, want.get(name)), (step, name)
    weaver.apply([])
    assert bits(net) == before
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == addresses


def test_strength_zero_is_the_base_and_the_same_stack_is_no_work() -> None:
    net = Net()
    before = bits(net)
    weaver = Weaver(net, keep="device")
    one, two = adapter(1), adapter(40)
    assert weaver.apply([(one, 0.0)]) == 0
    assert bits(net) == before
    assert weaver.apply([(one, 0.5), (two, 1.0)]) > 0
    assert weaver.apply([(one, 0.5), (two, 1.0)]) == 0
    touched = weaver.apply([(one, 0.5), (adapter(40, ("lora",)), 1.0)])
    assert touched > 0
    assert weaver.apply([(one, 0.0)]) > 0
    assert bits(net) == before


def test_only_tensors_whose_stack_changed_are_written() -> None:
    net = Net()
    weaver = Weaver(net, keep="device")
    small, large = adapter(1, ("lora",)), adapter(40, ("conv", "lokr"))
    assert weaver.apply([(small, 1.0), (large, 1.0)]) == 3
    assert weaver.apply([(small, 0.5), (large, 1.0)]) == 1
    assert weaver.apply([(large, 1.0)]) == 1
    assert weaver.apply([]) == 2


@settings(deadline=None, max_examples=sized(10, 50), suppress_health_check=list(HealthCheck))
@given(order=st.permutations(range(4)), strengths=st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_the_order_of_a_stack_does_not_matter(order: list[int], strengths: list[float]) -> None:
    """A stack is a set: the same bits for every order, merged while loading or swapped in."""
    net = Net()
    base, index = source_of(net), index_of(net)
    adapters = [adapter(10 * i) for i in range(4)]
    plans = [resolve(each, index) for each in adapters]
    straight = MergedSource(base, list(zip(plans, strengths, strict=True)))
    shuffled = MergedSource(base, [(plans[i], strengths[i]) for i in order])
    weaver = Weaver(net)
    weaver.apply([(adapters[i], strengths[i]) for i in order])
    for name in base.names():
        assert torch.equal(straight.get(name), shuffled.get(name)), name
        assert torch.equal(straight.get(name), net.state_dict()[name]), name


def test_adapters_that_differ_in_one_number_only_have_an_order_too() -> None:
    """The first bytes of all tensors agree, so that all of them decide."""
    tensors = {"unet.first.lora_down.weight": random(1, 64, 10), "unet.first.lora_up.weight": random(2, 12, 64)}
    up = tensors["unet.first.lora_up.weight"]
    data = bytearray(up.data)
    data[-2] ^= 0x11
    other = {**tensors, "unet.first.lora_up.weight": type(up)(up.dtype, up.shape, bytes(data))}
    stack = [(read(tensors), 0.7), (read(other), 0.7), (read(tensors), -0.3)]
    results = []
    for order in itertools.permutations(stack):
        net = Net()
        Weaver(net).apply(order)
        results.append(bits(net))
    assert all(result == results[0] for result in results)


class Injected(Exception):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_failure_at_any_tensor_leaves_no_half_merged_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(dtype)
    before = bits(net)
    weaver = Weaver(net, keep="device")
    one, two = adapter(1), adapter(40)
    total = weaver.apply([(one, 1.0)])
    write = Writer.write_one
    for failing in itertools.count():
        weaver.apply([(one, 1.0)])
        calls = itertools.count()

        def fail(self, place, items, scratch, calls=calls, failing=failing):  # type: ignore[no-untyped-def]
            if next(calls) == failing:
                raise Injected
            write(self, place, items, scratch)

        monkeypatch.setattr(Writer, "write_one", fail)
        try:
            weaver.apply([(one, 0.5), (two, 1.0)])
        except Injected:
            assert bits(net) == before, failing
            assert not weaver.woven
        else:
            break
        finally:
            monkeypatch.setattr(Writer, "write_one", write)
    assert failing >= total
    weaver.apply([])
    assert bits(net) == before


def test_faults_before_the_first_write_leave_the_old_stack() -> None:
    net = Net()
    weaver = Weaver(net, keep="device")
    weaver.apply([(adapter(1), 0.5)])
    woven = bits(net)
    broken = {
        "unet.first.lora_down.weight": tensor([[float("nan")] * 10]),
        "unet.first.lora_up.weight": random(1, 12, 1),
    }
    with pytest.raises(TargetError, match="NaN"):
        weaver.apply([(read(broken), 1.0)])
    other = {"unet.elsewhere.lora_down.weight": random(1, 2, 10), "unet.elsewhere.lora_up.weight": random(1, 12, 2)}
    with pytest.raises(TargetError, match="elsewhere"):
        weaver.apply([(read(other), 1.0)])
    bigger = ModelIndex({"unet": component_from_names("unet", {"first.weight": (24, 10), "far.weight": (3, 3)})})
    foreign = {"unet.first.lora_down.weight": random(1, 2, 10), "unet.first.lora_up.weight": random(1, 24, 2)}
    with pytest.raises(TargetError, match=r"\[24, 10\]"):
        weaver.apply([(resolve(read(foreign), bigger), 1.0)])
    with pytest.raises(ConfigError, match="finite"):
        weaver.apply([(adapter(1), float("inf"))])
    assert bits(net) == woven


def test_a_base_file_that_changed_on_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    net = Net()
    path = tmp_path / "base.safetensors"
    save_file({k: v.clone() for k, v in net.state_dict().items()}, path)
    source = FileSource(path)
    with torch.device("meta"):
        live = Net()
    build(live, source)
    for module in live.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.clone(), requires_grad=False)
    weaver = Weaver(live, sources=source, keep="file")
    weaver.apply([(adapter(1), 0.5)])
    weaver.apply([])
    assert bits(live) == bits(net)
    weaver.apply([(adapter(1), 0.5)])
    woven = bits(live)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(FormatError, match="changed on disk"):
        weaver.apply([(adapter(40), 1.0)])
    assert bits(live) == woven
    path.unlink()
    with pytest.raises(FormatError, match="disappeared"):
        weaver.apply([])


def test_a_model_that_looks_at_the_map_gets_its_base_back(tmp_path: Path) -> None:
    """Built on the CPU, weights are views of the mapped file; weaving writes there, so originals come from the file."""
    save_file({k: v.clone() for k, v in Net().state_dict().items()}, tmp_path / "base.safetensors")
    source = FileSource(tmp_path / "base.safetensors")
    with torch.device("meta"):
        net = Net()
    build(net, source)
    before, base = bits(net), source_of(net)
    weaver = Weaver(net, sources=source)
    for seed in (1, 40):
        weaver.apply([(adapter(seed), 0.5)])
        want = MergedSource(base, [(resolve(adapter(seed), weaver.index), 0.5)])
        assert all(torch.equal(value, want.get(name)) for name, value in net.state_dict().items())
    weaver.apply([])
    assert bits(net) == before


def test_two_threads_are_serialized() -> None:
    net = Net()
    base = source_of(net)
    weaver = Weaver(net, keep="device")
    stacks = [[(adapter(1), 1.0)], [(adapter(40), -1.0), (adapter(80, ("lora",)), 0.5)], []]
    plans = [[(resolve(a, weaver.index), s) for a, s in stack] for stack in stacks]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = stdlib_random.Random(seed)
        try:
            for _ in range(100):
                weaver.apply(chance.choice(stacks))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    matches = [
        all(torch.equal(v, MergedSource(base, plan).get(n)) for n, v in net.state_dict().items()) for plan in plans
    ]
    assert sum(matches) == 1


def test_strength_by_component_and_block() -> None:
    from inweave.targets.bases import known_index
    from inweave.weights.blocks import block_names

    blocks = block_names(known_index("sd1.5"))
    assert blocks["down_blocks.1.attentions.0.proj_in.weight"] == "IN04"
    assert blocks["mid_block.attentions.0.proj_in.weight"] == "MID"
    assert blocks["up_blocks.1.resnets.0.conv1.weight"] == "OUT03"
    by_block = Strength.block_list([1.0] * 7 + [0.0] + [1.0] * 9)
    assert by_block["MID"] == 0.0
    index = known_index("sd1.5")
    module = "mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"lora_unet_{module}.lora_down.weight": random(1, 2, 1280),
        f"lora_unet_{module}.lora_up.weight": random(2, 1280, 2),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": random(1, 2, 768),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": random(1, 3072, 2),
    }
    placements = resolve(read(tensors), index).placements
    strength = Strength(0.5, {"te": 0.2}, by_block)
    values = {placement.component: strength.at(placement, blocks) for placement in placements}
    assert values["unet"] == 0.0
    assert values["te1"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="18 block weights"):
        Strength.block_list([1.0] * 18)
    with pytest.raises(ConfigError, match="vae"):
        Strength.of({"vae": 1.0})
    flux = known_index("flux1-dev")
    inner = {"transformer.transformer_blocks.3.attn.to_q.lora_A.weight": random(1, 2, 3072),
             "transformer.transformer_blocks.3.attn.to_q.lora_B.weight": random(1, 3072, 2)}  # fmt: skip
    placement = resolve(read(inner), flux).placements[0]
    assert (
        Strength(blocks={"transformer_blocks.3": 0.25, "transformer_blocks.30": 9.0}).at(placement, block_names(flux))
        == 0.25
    )


@pytest.mark.parametrize(
    ("block", "near"),
    [("down_blokcs.1", "down_blocks.1"), ("IN4", "IN04"), ("OUT12", "OUT"), ("xyz", "blocks begin with")],
)
def test_a_block_that_the_model_does_not_have_is_an_error(block: str, near: str) -> None:
    from inweave.targets.bases import known_index

    index = known_index("sd1.5")
    module = "mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"lora_unet_{module}.lora_down.weight": random(1, 2, 1280),
        f"lora_unet_{module}.lora_up.weight": random(2, 1280, 2),
    }
    plan = resolve(read(tensors), index)
    base = DictSource({plan.placements[0].tensor: torch.zeros(1280, 1280)})
    with pytest.raises(ConfigError, match=f"no block '{block}'.*{near}"):
        MergedSource(base, [(plan, Strength(blocks={block: 0.5}))], index=index)
    MergedSource(base, [(plan, Strength(blocks={"MID": 0.5, "IN04": 1.0, "mid_block.attentions": 2.0}))], index=index)
    net = Net()
    with pytest.raises(ConfigError, match=r"no block 'frist'.*first"):
        Weaver(net).apply([(adapter(1), Strength(blocks={"frist": 0.5}))])
    Weaver(net).apply([(adapter(1), Strength(blocks={"first": 0.5}))])


def test_build_is_strict_and_names_everything() -> None:
    net = Net()
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.device("meta"):
        empty = Net(torch.float32)
    built = build(empty, DictSource(tensors))
    assert bits(built) == bits(net)
    tensors["extra.weight"] = torch.zeros(2)
    del tensors["first.bias"]
    tensors["conv.weight"] = torch.zeros(3, 3)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(TargetError) as raised:
        build(empty, DictSource(tensors))
    for word in ("missing: first.bias", "unused: extra.weight", "shape: conv.weight is [3, 3]"):
        assert word in str(raised.value)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.table.weight

    with torch.device("meta"):
        model = Tied()
    value = torch.randn(7, 5)
    build(model, DictSource({"table.weight": value}))
    assert model.head.weight is model.table.weight
    assert torch.equal(model.head.weight, value)
