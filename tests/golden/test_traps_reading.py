"""Traps of reading and writing: how a key is parsed, which files are refused, and which tensors are written."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import inweave
from inweave.adapter import Full
from inweave.errors import FormatError, TargetError
from inweave.formats.read import read
from inweave.targets.index import index_from_names
from tests.golden.weave import Base, close, known, lora, numbers, product, torch_base
from tests.support import lora_pair, random, tensor, write

BASE = torch_base({"net.proj.weight": (6, 5), "net.proj.bias": (6,), "net.square.weight": (5, 5)})


def test_a_plain_weight_is_ia3_only_next_to_on_input() -> None:
    pair, vector = lora("lora_unet_net_proj", 6, 5, alpha=2.0), random(1, 5)
    plain = {"lora_unet_net_square.weight": vector}
    plan = BASE.plan(pair | plain, strict=False)
    assert [set(finding.keys) for finding in plan.report.unplaced] == [set(plain)]
    assert "plain weight" in plan.report.unplaced[0].reason
    assert {p.tensor for p in plan.placements} == {"net.proj.weight"}
    whole = plain | {"lora_unet_net_square.on_input": tensor(1, "I64")}
    close(BASE.changes(pair | whole)["net.square.weight"], BASE["net.square.weight"] * numbers(vector)[None, :])


ATTENTION = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k"
FLUX, BFL = "transformer_blocks.0.attn.to_out.0", "double_blocks.0.img_attn.proj"


@pytest.mark.parametrize(
    ("base", "module", "home"),
    [
        ("sdxl", f"unet.base_model.model.{ATTENTION}", ATTENTION),
        ("sdxl", f"base_model.model.unet.{ATTENTION}", ATTENTION),
        ("sdxl", f"base_model.model.base_model.model.{ATTENTION}", ATTENTION),
        ("sdxl", f"unet.unet.{ATTENTION}", ATTENTION),
        ("flux1-dev", f"base_model.model.transformer.{FLUX}", FLUX),
        ("flux1-dev", f"base_model.model.transformer.diffusion_model.{BFL}", FLUX),
        ("flux1-dev", f"transformer.diffusion_model.{BFL}", FLUX),
        ("flux1-dev", f"base_model.model.diffusion_model.{BFL}", FLUX),
        ("flux1-dev", f"base_model.model.{BFL}", FLUX),
        ("flux1-dev", f"transformer.{FLUX}", FLUX),
        ("flux1-dev", FLUX.removeprefix("tran"), FLUX),
        ("qwen-image", f"base_model.model.transformer.{FLUX}", FLUX),
    ],
)
def test_wrappers_are_stripped_until_none_is_left(base: str, module: str, home: str) -> None:
    out, into = known(base).index.denoiser.parts[f"{home}.weight"]
    plan = known(base).plan(lora(module, out, into, spelling="peft", empty=True))
    assert [p.tensor for p in plan.placements] == [f"{home}.weight"]


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_unet__", "lora_unet_unet_"])
def test_doubled_prefixes_and_flattened_suffixes(prefix: str) -> None:
    flat = prefix + ATTENTION.replace(".", "_")
    pair = {key.replace(f"{flat}.", f"{flat}_"): item for key, item in lora(flat, 640, 640).items()}
    assert f"{flat}_lora_down.weight" in pair
    close(known("sdxl").changes(pair)[f"{ATTENTION}.weight"], product(pair))


def test_adapter_names_in_the_keys() -> None:
    pair, magnitude = lora("net.proj", 6, 5, spelling="named"), random(1, 6)
    after = BASE.merged(pair | {"net.proj.lora_magnitude_vector.default.weight": magnitude})["net.proj.weight"]
    changed = BASE["net.proj.weight"] + product(pair)
    close(after, changed / changed.norm(dim=1, keepdim=True) * numbers(magnitude)[:, None])


def test_two_names_are_two_adapters() -> None:
    pairs = {
        name: {
            key.replace("default", name): item for key, item in lora("net.proj", 6, 5, spelling="named", seed=n).items()
        }
        for n, name in enumerate(("first", "second"))
    }
    both = pairs["first"] | pairs["second"]
    with pytest.raises(FormatError, match="first, second"):
        read(both)
    with pytest.raises(FormatError, match="third"):
        read(both, name="third")
    for name, pair in pairs.items():
        close(BASE.changes(read(pair))["net.proj.weight"], product(pair))
        close(BASE.changes(read(both, name=name), strict=False)["net.proj.weight"], product(pair))


def pickled(content: object, *, zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


PICKLES = {
    "dict": pickled({"unet.a.lora_down.weight": torch.ones(2)}, zipped=True),
    "legacy dict": pickled({"unet.a.lora_down.weight": torch.ones(2)}, zipped=False),
    "numbered keys": pickled({0: torch.ones(2), 1: torch.ones(2)}, zipped=True),
    "list": pickled([torch.ones(4, 2), torch.ones(2, 4)], zipped=True),
    "legacy list": pickled([torch.ones(4, 2), torch.ones(2, 4)], zipped=False),
    **{f"protocol {n}": pickle.dumps([[1.0, 2.0], {"a": 1}], protocol=n) for n in range(6)},
}


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".safetensors", ""])
@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_are_refused_by_content(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(PICKLES[kind])
    if kind in ("protocol 0", "protocol 1") and suffix in (".safetensors", ""):
        expected = (
            "safetensors"  # these begin with ordinary letters: the message can only say that they are not safetensors
        )
    else:
        expected = "pickle"
    with pytest.raises(FormatError, match=expected):
        inweave.load(path)


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_lora_weights.bin"])
def test_a_directory_with_only_a_pickle(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(PICKLES["dict"])
    with pytest.raises(FormatError, match="pickle"):
        inweave.load(tmp_path)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.lin = torch.nn.Linear(5, 6)
        self.wide = Conv1D(7, 6)  # stored (6, 7): inputs first
        self.even = Conv1D(7, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.head = torch.nn.Linear(7, 4)


def saved_by_peft(path: Path, **options: object) -> tuple[Base, dict[str, torch.Tensor]]:
    """Save an adapter with PEFT; return its base and the weights that PEFT merges."""
    import peft

    torch.manual_seed(0)
    net = Net()
    before = {name: item.detach().clone().double() for name, item in net.state_dict().items()}
    config = peft.LoraConfig(r=3, lora_alpha=2, init_lora_weights=False, **options)  # type: ignore[arg-type]
    wrapped = peft.get_peft_model(net, config)
    with torch.no_grad():
        for item in wrapped.parameters():
            if item.requires_grad:
                item.add_(torch.randn_like(item))
    wrapped.save_pretrained(str(path))
    merged = {name: item.double() for name, item in wrapped.merge_and_unload().state_dict().items()}
    return Base(index_from_names({name: tuple(item.shape) for name, item in before.items()}), before), merged


def assert_merges_alike(path: Path, base: Base, expected: dict[str, torch.Tensor]) -> set[str]:
    """Assert that the same tensors change as in PEFT, with the same values; return their names."""
    merged = base.merged(inweave.load(path))
    touched = {name for name, item in expected.items() if not torch.allclose(item, base[name], atol=1e-6)}
    assert touched == set(merged)
    for name in touched:
        close(merged[name], expected[name], 2e-6)
    return touched


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_modules_to_save_and_biases_replace(bias: str, tmp_path: Path) -> None:
    base, expected = saved_by_peft(tmp_path, target_modules=["lin"], modules_to_save=["head"], bias=bias)
    touched = assert_merges_alike(tmp_path, base, expected)
    expected_names = {"lin.weight", "head.weight", "head.bias"} | ({"lin.bias"} if bias != "none" else set())
    assert touched == expected_names | ({"norm.bias", "wide.bias", "even.bias"} if bias == "all" else set())
    saved = [e for e in inweave.load(tmp_path) if e.ref.name == "head"]
    assert all(isinstance(e.factors, Full) and e.factors.mode == "set" for e in saved)
    half = base.merged(inweave.load(tmp_path), 0.5)
    close(half["head.weight"], expected["head.weight"], 2e-6)


def test_a_saved_head_the_base_does_not_have_is_carried(tmp_path: Path) -> None:
    base, expected = saved_by_peft(tmp_path, target_modules=["lin"], modules_to_save=["head"])
    headless = {name: item for name, item in base.weights.items() if not name.startswith("head.")}
    bare = Base(index_from_names({name: tuple(item.shape) for name, item in headless.items()}), headless)
    plan = bare.plan(inweave.load(tmp_path))
    assert {p.tensor for p in plan.placements if p.creates} == {"head.weight", "head.bias"}
    close(bare.merged(inweave.load(tmp_path))["head.weight"], expected["head.weight"], 2e-6)


def test_lora_bias_is_added_with_the_scale(tmp_path: Path) -> None:
    base, expected = saved_by_peft(tmp_path, target_modules=["lin"], lora_bias=True)
    assert assert_merges_alike(tmp_path, base, expected) == {"lin.weight", "lin.bias"}


@pytest.mark.parametrize("use_dora", [False, True])
def test_fan_in_fan_out_transposes_the_change(use_dora: bool, tmp_path: Path) -> None:
    """A square layer proves it: only the configuration determines its orientation."""
    base, expected = saved_by_peft(tmp_path, target_modules=["wide", "even"], fan_in_fan_out=True, use_dora=use_dora)
    assert assert_merges_alike(tmp_path, base, expected) == {"wide.weight", "even.weight"}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 75612345\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{}", "2 bytes"),
        (b"\r\n", "2 bytes"),
        (POINTER, "git lfs pull"),
        (b"<!DOCTYPE html><html>" + b" " * 200, "web page"),
        (b"GGUF" + bytes(60), "GGUF"),
        ((500).to_bytes(8, "little") + b'{"a":', "cut short"),
        ((2).to_bytes(8, "little") + b"{}", "no tensors"),
    ],
)
def test_files_that_are_no_adapter_say_what_they_are(content: bytes, words: str, tmp_path: Path) -> None:
    assert content != POINTER or len(content) in range(130, 136)
    path = tmp_path / "style.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=words) as caught:
        inweave.load(path)
    assert "style.safetensors" in str(caught.value)


def test_an_alpha_without_tensors_is_an_orphan() -> None:
    pair = lora("lora_unet_net_proj", 6, 5, alpha=2.0)
    plan = BASE.plan(pair | {"lora_unet_net_square.alpha": tensor(4.0)}, strict=False)
    assert [finding.keys for finding in plan.report.orphans] == [("lora_unet_net_square.alpha",)]
    assert "alpha" in plan.report.orphans[0].reason
    assert (plan.report.placed, plan.report.tensors) == (3, 4)
    with pytest.raises(TargetError, match=r"net_square\.alpha"):
        BASE.plan(pair | {"lora_unet_net_square.alpha": tensor(4.0)})


@pytest.mark.parametrize("half", ["lora_down.weight", "lora_up.weight"])
def test_half_a_pair_is_an_orphan_with_its_alpha(half: str) -> None:
    pair = lora("lora_unet_net_proj", 6, 5)
    other = lora("lora_unet_net_square", 5, 5, alpha=2.0)
    del other[f"lora_unet_net_square.{half}"]
    plan = BASE.plan(pair | other, strict=False)
    assert {key for finding in plan.report.orphans for key in finding.keys} == set(other)


def test_split_tensors_are_written_apart(tmp_path: Path) -> None:
    """q, k and v share `down` and take rows of `up`: the safetensors library must accept the file."""
    qkv, linear1 = "lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_single_blocks_0_linear1"
    source = lora(qkv, 9216, 3072, 2, alpha=1.0, dtype="F16") | lora(linear1, 21504, 3072, 2, alpha=1.0, dtype="F16")
    out = tmp_path / "out.safetensors"
    inweave.convert(write(tmp_path / "in.safetensors", source), out, to="diffusers", base="flux1-dev")
    item = load_file(out)
    with safe_open(out, "pt") as opened:
        assert set(opened.keys()) == set(item)
    assert len(item) == 14
    assert len({value.data_ptr() for value in item.values()}) == 14
    save_file(item, tmp_path / "again.safetensors")
    parts = {"to_q": 0, "to_k": 3072, "to_v": 6144}
    for block, module in (("transformer_blocks", qkv), ("single_transformer_blocks", linear1)):
        for leaf, start in parts.items():
            name = f"transformer.{block}.0.attn.{leaf}"
            assert torch.equal(item[f"{name}.lora_A.weight"].double(), numbers(source[f"{module}.lora_down.weight"]))
            up = numbers(source[f"{module}.lora_up.weight"])[start : start + 3072]
            assert torch.equal(item[f"{name}.lora_B.weight"].double(), up)
    mlp = item["transformer.single_transformer_blocks.0.proj_mlp.lora_B.weight"]
    assert torch.equal(mlp.double(), numbers(source[f"{linear1}.lora_up.weight"])[9216:])


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_alpha_that_is_not_finite_is_named(value: float) -> None:
    adapter = read(lora_pair("lora_unet_conv_out", 4, 320) | {"lora_unet_conv_out.alpha": tensor(value)})
    assert [problem.fault for problem in adapter.problems] == ["malformed"]
    assert "alpha" in adapter.problems[0].reason


def test_only_factors_count_as_zeros() -> None:
    module = "lora_unet_up_blocks_1_attentions_0_proj_in"
    tensors = lora_pair(module, 1280, 1280) | {f"{module}.alpha": tensor(0.0)}
    assert inweave.check(read(tensors), "sd1.5").zeros == []
    loha = {
        f"{module}.hada_{role}": random(1, *shape)
        for role, shape in (("w1_a", (1280, 2)), ("w1_b", (2, 1280)), ("w2_b", (2, 1280)))
    }
    loha[f"{module}.hada_w2_a"] = tensor(np.zeros((1280, 2)))
    assert inweave.check(read(loha), "sd1.5").zeros == [f"{module}.hada_w2_a"]
