"""Live adapters to files and back: the same bits, the same places, the same numbers."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inweave.adapter import Adapter, Lora, Tensor
from inweave.errors import ConfigError, FormatError, TargetError
from inweave.exchange.convert import rewrite, save
from inweave.formats.read import read
from inweave.layers import attach, collect, inject, lora_layers, merge, model_index
from inweave.ops.delta import change
from inweave.targets.bases import known_index
from inweave.targets.resolve import resolve
from tests.support import random, tensor
from tests.unit.layers.test_inject import Net
from tests.unit.layers.zoo import KINDS, adapted, fill, injected, layer_of, reference


def rewritten(adapter: Adapter, model: nn.Module, dialect: str) -> Adapter:
    """Through a dialect and the reader."""
    output = rewrite(adapter, dialect, model_index(model))
    assert not output.lost
    return read(output.tensors, output.metadata, output.config)


def same_factors(one: Adapter, two: Adapter) -> None:
    left, right = ({entry.ref.name: entry.factors for entry in adapter} for adapter in (one, two))
    assert left.keys() == right.keys()
    for name, factors in left.items():
        other = right[name]
        assert factors.tensors().keys() == other.tensors().keys()
        assert all(value.same(other.tensors()[role]) for role, value in factors.tensors().items())
        assert factors.scale == other.scale
        if factors.magnitude is not None:
            assert bytes(factors.magnitude.tensor.data) == bytes(other.magnitude.tensor.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_collect_then_resolve_gives_the_merged_weight(kind: str, dtype: torch.dtype) -> None:
    """The adapter by its names and the formula = the merged layer, bit for bit."""
    model = adapted(kind, dora=dtype == torch.float32, dtype=dtype)
    adapter = collect(model)
    plan = resolve(adapter, model_index(model))
    assert plan.report.clean
    (placement,) = plan.placements
    assert placement.tensor == "layer.weight"
    weight = layer_of(model).weight.detach().clone()
    expected = (weight + change(placement.factors, weight)).to(weight.dtype)
    merge(model)
    assert torch.equal(layer_of(model).weight, expected)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}, {"alpha": None}], ids=str)
def test_inject_collect_write_read_inject(options: dict[str, object]) -> None:
    options = {"alpha": 6.0} | options
    targets = ["to_q", "to_k", "to_out.0", "c_fc"]
    base = Net()
    model = injected(copy.deepcopy(base), 3, targets=targets, rank_pattern={"to_k": 2}, **options)  # type: ignore[arg-type]
    fill(model)
    adapter = collect(model)
    assert len(adapter) == 8 and adapter.algorithms == ("dora" if options.get("dora") else "lora",)
    back = rewritten(adapter, model, "peft")
    same_factors(adapter, back)
    twin = attach(copy.deepcopy(base), back)
    same_factors(adapter, collect(twin))
    x = torch.randn(2, 6)
    for name, layer in lora_layers(model).items():
        assert torch.equal(layer(x), lora_layers(twin)[name](x))


def test_an_embedding_and_alphas_survive_peft_and_candle() -> None:
    model = inject(Net(), 3, 6.0, ["embed", "to_q"])
    fill(model)
    for dialect in ("peft", "candle"):
        same_factors(collect(model), rewritten(collect(model), model, dialect))


def test_saving_a_peft_directory(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from inweave.exchange.load import load

    base = Net()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    model = inject(copy.deepcopy(base), 3, 6.0, ["to_q", "embed"])
    fill(model)
    save(collect(model), tmp_path / "out", dialect="peft", base=tmp_path / "base.safetensors")
    twin = attach(base, load(tmp_path / "out"))
    for name, layer in lora_layers(twin).items():
        ours: Any = lora_layers(model)[name].branch("default")
        read_back: Any = layer.branch("default")
        assert torch.equal(read_back.down, ours.down)
        assert torch.equal(read_back.up, ours.up)
        assert read_back.scale == ours.scale == 2.0


def test_names_and_components() -> None:
    model = inject(Net(), 3, targets=["to_q"], name="style")
    with pytest.raises(ConfigError, match=r"'default'; the model has style"):
        collect(model)
    entry = collect(model, "style", component="unet").entries[0]
    assert (entry.ref.component, entry.ref.name, entry.ref.flat) == ("unet", "blocks.0.to_q", False)
    assert entry.factors.alpha is None and entry.factors.stored_alpha is None


def kohya(*modules: tuple[str, int, int], alpha: float | None = 2.0, **more: Tensor) -> Adapter:
    tensors: dict[str, Tensor] = {}
    for seed, (name, out, into) in enumerate(modules):
        tensors[f"{name}.lora_down.weight"] = random(seed, 4, into, dtype="F16")
        tensors[f"{name}.lora_up.weight"] = random(seed + 50, out, 4, dtype="F16")
        if alpha is not None:
            tensors[f"{name}.alpha"] = tensor(alpha, "F16")
    return read(tensors | more)


def test_a_flat_named_file_finds_its_modules_and_keeps_its_bits() -> None:
    adapter = kohya(("lora_unet_blocks_0_to_q", 6, 6), ("lora_unet_blocks_1_to_out_0", 6, 6))
    model = attach(Net(), adapter, name="file", dropout=0.3, trainable=True)
    assert set(lora_layers(model)) == {"blocks.0.to_q", "blocks.1.to_out.0"}
    pair = model.blocks[0].to_q.branch("file")
    assert pair.down.dtype == torch.float16 and pair.scale == 0.5 and pair.dropout == 0.3
    assert all(parameter.requires_grad for parameter in pair.parameters())
    back = collect(model, "file")
    assert {entry.ref.name for entry in back} == {"blocks.0.to_q", "blocks.1.to_out.0"}
    for entry, original in zip(back, adapter, strict=True):
        mine, other = entry.factors, original.factors
        assert isinstance(mine, Lora) and isinstance(other, Lora)
        assert mine.down.same(other.down)
        assert mine.stored_alpha is not None and other.stored_alpha is not None
        assert mine.stored_alpha.same(other.stored_alpha)
    wide = attach(Net(), adapter, dtype=torch.float32)
    assert wide.blocks[0].to_q.branch("default").down.dtype == torch.float32


def test_a_square_layer_is_read_the_way_it_stores_its_weight() -> None:
    """fan_in_fan_out names the whole model; to_q is a Linear and c_fc a Conv1D, both 6 x 6."""
    model = inject(Net(), 3, 6.0, ["to_q", "c_fc"])
    fill(model)
    adapter = collect(model)
    assert {entry.ref.name: entry.factors.transposed for entry in adapter}["blocks.0.c_fc"]
    twin = attach(Net(), rewritten(adapter, model, "peft"))
    x = torch.randn(2, 6)
    for name, layer in lora_layers(model).items():
        assert torch.equal(layer(x), lora_layers(twin)[name](x))


def test_a_file_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    model = Net()
    modules = dict(model.named_modules())
    for adapter, message in (
        (kohya(("lora_unet_blocks_0_to_v", 6, 6)), "no module of this name"),
        (kohya(("lora_unet_blocks_0_to_q", 6, 5)), r"the base has \[6, 6\]"),
    ):
        with pytest.raises(TargetError, match=message):
            attach(model, adapter)
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def refused_kinds() -> dict[str, tuple[dict[str, Tensor], str]]:
    name = "blocks.0.to_q"
    pair = {f"{name}.lora_down.weight": random(0, 2, 6), f"{name}.lora_up.weight": random(1, 6, 2)}
    return {
        "glora": (
            {f"{name}.{a}{i}.weight": random(i, *(6, 2) if i == 1 else (2, 6)) for i in (1, 2) for a in "ab"},
            "glora cannot be a layer",
        ),
        "input dora": (pair | {f"{name}.dora_scale": random(2, 1, 6)}, "along the inputs"),
    }  # fmt: skip


@pytest.mark.parametrize("case", refused_kinds())
def test_what_cannot_be_a_layer_is_refused_with_its_name(case: str) -> None:
    tensors, message = refused_kinds()[case]
    adapter = read({f"diffusion_model.{key}": value for key, value in tensors.items()})
    assert not adapter.problems
    model = Net()
    with pytest.raises(TargetError, match=rf"merge it instead(.|\n)*blocks\.0\..*{message}"):
        attach(model, adapter)
    assert not lora_layers(model)


def test_components_are_chosen_where_a_file_holds_several() -> None:
    adapter = kohya(("lora_unet_blocks_0_to_q", 6, 6), ("lora_te1_text_model_encoder_layers_0_mlp_fc1", 6, 6))
    with pytest.raises(TargetError, match="the adapter holds te1, unet: choose one with component="):
        attach(Net(), adapter)
    assert set(lora_layers(attach(Net(), adapter, component="unet"))) == {"blocks.0.to_q"}
    with pytest.raises(ConfigError, match="nothing for component 'te2'; it has te1, unet"):
        attach(Net(), adapter, component="te2")


def hollow_model(naming: str) -> nn.Module:
    """Flux as a live model without data, under diffusers' names or the original ones, where q, k, v are fused."""
    tensors = known_index("flux1-dev", naming).components["unet"].tensors  # type: ignore[arg-type]
    model = nn.Module()
    with torch.device("meta"):
        for name, shape in sorted(tensors.items(), reverse=True):  # weights before biases
            *path, leaf = name.removeprefix("model.diffusion_model.").split(".")
            parent = model
            for part in path[:-1]:
                if part not in parent._modules:
                    parent.register_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if path[-1] not in parent._modules:
                linear = leaf == "weight" and len(shape) == 2
                parent.register_module(path[-1], nn.Linear(shape[1], shape[0]) if linear else nn.Module())
            parent._modules[path[-1]].register_parameter(leaf, nn.Parameter(torch.empty(shape)))
    return model


def product(model: nn.Module, name: str) -> torch.Tensor:
    pair = lora_layers(model)[name].branch("default")
    return pair.scale * pair.product().detach()


def test_a_fused_file_is_cut_for_a_model_with_separate_layers() -> None:
    adapter = kohya(("lora_unet_double_blocks_3_img_attn_qkv", 9216, 3072))
    model = attach(hollow_model("diffusers"), adapter)
    home = "transformer_blocks.3.attn."
    assert set(lora_layers(model)) == {f"{home}to_q", f"{home}to_k", f"{home}to_v"}
    whole = change(adapter.entries[0].factors, None)
    assert whole.abs().max() > 0
    for part, expected in zip(("to_q", "to_k", "to_v"), whole.chunk(3), strict=True):
        torch.testing.assert_close(product(model, home + part), expected, rtol=1e-5, atol=1e-6)


def test_separate_files_are_joined_for_a_model_with_fused_layers() -> None:
    names = [f"transformer.transformer_blocks.3.attn.{part}" for part in ("to_q", "to_v")]
    tensors = {}
    for seed, name in enumerate(names):
        tensors[f"{name}.lora_A.weight"] = random(seed, 4, 3072)
        tensors[f"{name}.lora_B.weight"] = random(seed + 50, 3072, 4)
    adapter = read(tensors)
    model = attach(hollow_model("original"), adapter)
    assert list(lora_layers(model)) == ["double_blocks.3.img_attn.qkv"]
    parts = product(model, "double_blocks.3.img_attn.qkv").chunk(3)
    first, last = (change(entry.factors, None) for entry in adapter)
    for got, expected in zip(parts, (first, torch.zeros_like(first), last), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_swapped_halves() -> None:
    """The last modulation has (shift, scale) in one naming and (scale, shift) in the other."""
    adapter = kohya(("lora_unet_final_layer_adaLN_modulation_1", 6144, 3072))
    model = attach(hollow_model("diffusers"), adapter)
    shift, scale = change(adapter.entries[0].factors, None).chunk(2)
    torch.testing.assert_close(product(model, "norm_out.linear"), torch.cat([scale, shift]), rtol=1e-5, atol=1e-6)


def test_parts_that_have_no_common_pair_are_refused() -> None:
    """DoRA on q only: the magnitude would have to leave k and v unchanged."""
    name = "transformer.transformer_blocks.3.attn.to_q"
    tensors = {
        f"{name}.lora_A.weight": random(0, 2, 3072), f"{name}.lora_B.weight": random(1, 3072, 2),
        f"{name}.lora_magnitude_vector": random(2, 3072),
    }  # fmt: skip
    model = hollow_model("original")
    with pytest.raises(TargetError, match=r"double_blocks\.3\.img_attn\.qkv\.weight: .* no common pair"):
        attach(model, read(tensors))


def test_convolutions_and_matrices_may_be_stored_either_way() -> None:
    """A matrix for a 1x1 convolution, and a convolution for a Linear."""
    model = nn.ModuleDict({"conv": KINDS["conv2d-1x1"].module()["layer"], "linear": nn.Linear(7, 5)})
    adapter = read(
        {
            "lora_unet_conv.lora_down.weight": random(0, 2, 4), "lora_unet_conv.lora_up.weight": random(1, 3, 2),
            "lora_unet_linear.lora_down.weight": random(2, 2, 7, 1, 1),
            "lora_unet_linear.lora_up.weight": random(3, 5, 2, 1, 1),
        }
    )  # fmt: skip
    attach(model, adapter)
    single = nn.ModuleDict({"layer": model["conv"]})
    x = KINDS["conv2d-1x1"].input()
    torch.testing.assert_close(model["conv"](x).double(), reference(single, x), rtol=1e-5, atol=1e-5)
    assert model["linear"].branch("default").down.shape == (2, 7)
    factors = collect(model).entries[0].factors
    assert isinstance(factors, Lora) and factors.down.shape == (2, 4, 1, 1)


def test_a_second_adapter_resolves_past_the_first() -> None:
    model = inject(Net(), 3, targets=["to_q", "embed"])
    attach(model, kohya(("lora_unet_blocks_0_to_q", 6, 6)), name="file")
    assert list(lora_layers(model)["blocks.0.to_q"].adapters) == ["default", "file"]
    assert "adapters" not in " ".join(next(iter(model_index(model))).parts)


def test_clip_is_named_without_its_root_in_memory() -> None:
    """Files say text_model.encoder...; the live network of transformers 5 has encoder..."""
    encoder = nn.ModuleDict({
        "embeddings": nn.ModuleDict({"token_embedding": nn.Embedding(9, 6)}),
        "encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(6, 6)})])}),
    })  # fmt: skip
    attach(encoder, kohya(("lora_te1_text_model_encoder_layers_0_fc1", 6, 6)))
    assert list(lora_layers(encoder)) == ["encoder.layers.0.fc1"]


def test_an_adapter_brings_its_own_options() -> None:
    adapter = kohya(("lora_unet_blocks_0_to_q", 6, 6))
    assert not {"rank", "alpha", "targets", "spec"} & set(inspect.signature(attach).parameters)
    with pytest.raises(ConfigError) as caught:
        attach(Net(), adapter, dropout=1.5, dtype=torch.int8)
    assert [str(problem).partition(" ")[0] for problem in caught.value.problems] == ["dropout", "dtype"]
    with pytest.raises(ConfigError, match=r"attach\(model, adapter\)"):
        inject(Net(), adapter)  # type: ignore[arg-type]


def test_a_file_is_attached_by_its_path(tmp_path: Path) -> None:
    model = inject(Net(), 3, 6.0, ["to_q"])
    fill(model)
    save(collect(model), tmp_path / "style", dialect="peft", base=model_index(model))
    for path in (tmp_path / "style", str(tmp_path / "style")):
        twin = attach(Net(), path)
        ours, theirs = (lora_layers(each)["blocks.0.to_q"].branch("default") for each in (model, twin))
        assert torch.equal(ours.product(), theirs.product())
    with pytest.raises(FormatError, match="missing"):
        attach(Net(), tmp_path / "missing.safetensors")


def test_a_shared_module_takes_one_pair() -> None:
    """Both names of one module in a file: its weight exists once, so the second pair has no place."""
    model = nn.ModuleDict({"front": nn.Linear(6, 6)})
    model["back"] = model["front"]
    one = attach(copy.deepcopy(model), kohya(("lora_unet_back", 6, 6)))
    assert lora_layers(one)["front"].names == ("front", "back")
    with pytest.raises(TargetError, match="under another of its names"):
        attach(model, kohya(("lora_unet_front", 6, 6), ("lora_unet_back", 6, 6)))


def test_training_a_loaded_adapter_leaves_its_file_alone() -> None:
    """A mapped file may be writable memory; the parameters are the model's own."""
    buffers = [bytearray(bytes(random(seed, 6, 6).data)) for seed in (0, 1)]
    views = [Tensor("F32", (6, 6), memoryview(buffer)) for buffer in buffers]
    tensors = {"lora_unet_blocks_0_to_q.lora_down.weight": views[0], "lora_unet_blocks_0_to_q.lora_up.weight": views[1]}
    model = attach(Net(), read(tensors))
    before = [bytes(buffer) for buffer in buffers]
    with torch.no_grad():
        for parameter in model.blocks[0].to_q.branch("default").parameters():
            parameter.add_(1.0)
    assert [bytes(buffer) for buffer in buffers] == before
