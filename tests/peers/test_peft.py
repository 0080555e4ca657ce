"""What inweave writes as PEFT loads in PEFT with every key used, and merges to the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

peft = pytest.importorskip("peft")

from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel  # noqa: E402

from inweave.adapter import Adapter  # noqa: E402
from inweave.exchange.convert import save  # noqa: E402
from inweave.exchange.load import load  # noqa: E402
from inweave.formats.files import write_file  # noqa: E402
from inweave.ops.delta import change  # noqa: E402
from inweave.targets.index import ModelIndex, index_from_names  # noqa: E402
from inweave.targets.resolve import resolve  # noqa: E402
from tests.peers import models  # noqa: E402


def base_file(module: torch.nn.Module, path: Path) -> Path:
    from safetensors.torch import save_file

    save_file({name: value.clone() for name, value in module.state_dict().items()}, path)
    return path


def merged(adapter: Adapter, index: ModelIndex, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for placement in resolve(adapter, index).placements:
        weight = state[placement.tensor]
        state[placement.tensor] = weight + change(placement.factors, weight)
    return state


def loaded(module: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Load a directory the way users do and merge; any key PEFT does not use is an error."""
    model = peft.PeftModel.from_pretrained(module, str(folder))
    stored = {key.removeprefix("base_model.model.") for key in _keys(folder)}
    used = {name.replace(".default", "").removeprefix("base_model.model.") for name in model.state_dict()}
    assert stored <= {name.removesuffix(".weight") for name in used} | used
    return model.merge_and_unload().state_dict()


def _keys(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


def attention(name: str) -> bool:
    return "attn" in name


@pytest.mark.parametrize("alpha", [None, 2.0])
def test_a_kohya_file_becomes_a_peft_directory(alpha: float | None, tmp_path: Path) -> None:
    unet = models.sd_unet()
    base = base_file(unet, tmp_path / "unet.safetensors")
    tensors = models.random_lora("unet.", unet, lambda name: True, alpha=alpha, ranks=(2, 4, 3), vary=True)
    first = save(models.adapter_from(tensors), tmp_path / "a.safetensors", dialect="kohya", base=base)
    assert not first.lost
    save(load(first.path), tmp_path / "peft", dialect="peft", base=base)
    adapter = load(first.path)
    ours = merged(adapter, models.index_of(unet=unet), unet)
    models.assert_same_state(ours, loaded(unet, tmp_path / "peft"), len(tensors))


def test_loha_becomes_a_peft_loha_directory(tmp_path: Path) -> None:
    unet = models.sd_unet()
    base = base_file(unet, tmp_path / "unet.safetensors")
    rng = models.np.random.default_rng(5)
    tensors = {}
    for name, layer in unet.named_modules():
        if isinstance(layer, torch.nn.Linear) and attention(name):
            out, into = layer.weight.shape
            module = "lora_unet_" + name.replace(".", "_")
            for role, shape in (("w1_a", (out, 3)), ("w1_b", (3, into)), ("w2_a", (out, 3)), ("w2_b", (3, into))):
                tensors[f"{module}.hada_{role}"] = models.tensor(rng.standard_normal(shape) * 0.3)
            tensors[f"{module}.alpha"] = models.tensor(1.5)
    adapter = models.adapter_from(tensors)
    ours = merged(adapter, models.index_of(unet=unet), unet)
    save(adapter, tmp_path / "peft", dialect="peft", base=base)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["peft_type"] == "LOHA"
    models.assert_same_state(ours, loaded(unet, tmp_path / "peft"), len(tensors))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=2))


def bert() -> BertModel:
    torch.manual_seed(5)
    return BertModel(
        BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40)
    )


def fill(model: torch.nn.Module) -> None:
    """Give every adapter parameter numbers, so that nothing is proved on zeros."""
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if any(mark in name for mark in ("lora_", "hada_", "lokr_", "oft_", "boft_", "ia3_", "modules_to_save")):
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = (
                parameter.data.float() + noise if "magnitude" in name or "boft_s" in name or "ia3" in name else noise
            )


CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=["query", "value"]),
    "rslora": lambda: peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["query", "dense"]),
    "dora": lambda: peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=["query", "value"]),
    "patterns": lambda: peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["query", "key", "value"], rank_pattern={"layer.0.attention.self.query": 2},
        alpha_pattern={"value": 1, r"^encoder\.layer\.1.*key": 12},
    ),
    "regex": lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=r".*\.layer\.1\..*(query|dense)"),
    "bias": lambda: peft.LoraConfig(r=4, lora_alpha=6, lora_bias=True, target_modules=["query"]),
    "saved": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=["query"], modules_to_save=["pooler"]),
    "bias_lora_only": lambda: peft.LoraConfig(r=4, lora_alpha=6, bias="lora_only", target_modules=["query"]),
    "embedding": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=["word_embeddings", "query"]),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=["query", "value"]),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=6, target_modules=["query", "value"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["query"]),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["query"]),
    "ia3": lambda: peft.IA3Config(target_modules=["query", "output.dense"], feedforward_modules=["output.dense"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["query", "value"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_directories_that_peft_writes_are_read_exactly(kind: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(bert(), CONFIGS[kind]())
    fill(model)
    model.save_pretrained(str(tmp_path / "peft"))
    adapter = load(tmp_path / "peft")
    assert not adapter.problems
    base = bert()
    index = index_from_names({name: tuple(value.shape) for name, value in base.state_dict().items()})
    ours = merged(adapter, index, base)
    theirs = model.merge_and_unload().state_dict()
    theirs = {
        name.replace("modules_to_save.default.", ""): v for name, v in theirs.items() if "original_module" not in name
    }
    models.assert_same_state(ours, theirs, len(adapter))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "patterns", "regex", "saved", "embedding", "loha"])
def test_peft_to_peft_keeps_every_tensor_and_the_configuration(kind: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(bert(), CONFIGS[kind]())
    fill(model)
    model.save_pretrained(str(tmp_path / "one"))
    base = base_file(bert(), tmp_path / "base.safetensors")
    save(load(tmp_path / "one"), tmp_path / "two", dialect="peft", base=base)
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(one.tensors[key].same(two.tensors[key]) for key in one.tensors)
    first = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "two" / "adapter_config.json").read_text()) == first
    models.assert_same_state(
        model.merge_and_unload().state_dict() if kind != "saved" else {},
        loaded(bert(), tmp_path / "two") if kind != "saved" else {},
        1,
    )


def test_gpt2_conv1d_is_transposed(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"])
    model = peft.get_peft_model(gpt2(), config)
    fill(model)
    model.save_pretrained(str(tmp_path / "peft"))
    base = gpt2()
    index = index_from_names({name: tuple(value.shape) for name, value in base.state_dict().items()})
    ours = merged(load(tmp_path / "peft"), index, base)
    models.assert_same_state(ours, model.merge_and_unload().state_dict(), 1)


def test_square_layers_follow_the_shapes_of_the_others_and_not_a_flag_that_none_of_them_shows(tmp_path: Path) -> None:
    """GPT-2's attn.c_proj is square; the configuration of another program, or none, says nothing of Conv1D."""
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn", "c_proj"]))
    fill(model)
    model.save_pretrained(str(tmp_path / "peft"))
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": False}))
    base = gpt2()
    index = index_from_names({name: tuple(value.shape) for name, value in base.state_dict().items()})
    ours = merged(load(tmp_path / "peft"), index, base)
    models.assert_same_state(ours, model.merge_and_unload().state_dict(), 1)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_a_live_model_knows_the_layout_of_every_layer(flag: bool, options: dict[str, bool], tmp_path: Path) -> None:
    """PEFT decides by the class of a layer, and writes one fan_in_fan_out for a model that has both."""
    from transformers.pytorch_utils import Conv1D

    import inweave

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.conv1d = torch.nn.Linear(8, 8), Conv1D(8, 8)
            self.wide, self.tall = Conv1D(12, 8), torch.nn.Linear(8, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.linear(x), self.conv1d(x), self.wide(x), self.tall(x)], -1)

    names = ["linear", "conv1d", "wide", "tall"]
    model = peft.get_peft_model(Both(), peft.LoraConfig(r=4, lora_alpha=6, target_modules=names, **options))
    fill(model)
    model.save_pretrained(str(tmp_path / "peft"))
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": flag}))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    expected, base = model(x), Both()
    weaver = inweave.Weaver(base)
    weaver.apply([(load(tmp_path / "peft"), 1.0)])
    torch.testing.assert_close(base(x), expected)
    weaver.apply([])
    assert all(torch.equal(one, two) for one, two in zip(base.parameters(), Both().parameters(), strict=True))
    inweave.attach(base, load(tmp_path / "peft"))
    torch.testing.assert_close(base(x), expected)


def test_a_bias_that_a_layer_lacks_is_named_and_attached(tmp_path: Path) -> None:
    import inweave

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.to_q = torch.nn.Linear(6, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.to_q(x))

    model = peft.get_peft_model(Plain(), peft.LoraConfig(r=2, lora_alpha=3, lora_bias=True, target_modules=["to_q"]))
    fill(model)
    model.save_pretrained(str(tmp_path / "peft"))
    base, x = Plain(), torch.randn(3, 6)
    with pytest.raises(inweave.TargetError, match=r"to_q\.bias: this adapter adds a bias to a layer that has none"):
        inweave.Weaver(base).apply([(load(tmp_path / "peft"), 1.0)])
    inweave.attach(base, load(tmp_path / "peft"))
    torch.testing.assert_close(base(x), model(x))


def test_a_missing_alpha_is_an_error_not_a_guess(tmp_path: Path) -> None:
    from inweave.errors import FormatError

    model = peft.get_peft_model(bert(), CONFIGS["lora"]())
    model.save_pretrained(str(tmp_path / "peft"))
    path = tmp_path / "peft" / "adapter_config.json"
    document = json.loads(path.read_text())
    del document["lora_alpha"]
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="lora_alpha"):
        load(tmp_path / "peft")


def test_raw_state_dict_with_adapter_names(tmp_path: Path) -> None:
    """A dump of the live model keeps `.default.` in the keys; two names are two adapters."""
    from inweave.errors import FormatError

    model = peft.get_peft_model(bert(), CONFIGS["dora"]())
    fill(model)
    tensors = {
        name: models.tensor(value.detach().numpy()) for name, value in model.state_dict().items() if "lora_" in name
    }
    write_file(tmp_path / "raw.safetensors", tensors)
    adapter = load(tmp_path / "raw.safetensors")
    assert not adapter.problems
    assert len(adapter) == 4
    other = {key.replace(".default", ".other"): value for key, value in tensors.items()}
    write_file(tmp_path / "two.safetensors", tensors | other)
    with pytest.raises(FormatError, match="default, other"):
        load(tmp_path / "two.safetensors")
    assert len(load(tmp_path / "two.safetensors", name="other")) == 4
