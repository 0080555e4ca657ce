"""candle-lora files under the names its own models look up, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import ConfigError, TargetError
from inweave.formats.files import write_file
from tests.support import random, zeros

CASES = {
    ("mistral", "model.layers.0.self_attn.q_proj"): "model.layers.0.self_attn.q_proj.traced_lora_linear.a0.weight",
    (
        "t5",
        "encoder.block.0.layer.0.SelfAttention.q",
    ): "encoder.block.0.layer.0.SelfAttention.q.traced_lora_linear.a0.weight",
    (
        "bert",
        "bert.encoder.layer.0.attention.self.query",
    ): "bert.encoder.layer.0.attention.self.query.lora_linear.a0.weight",
    ("", "h.0.attn"): "h.0.attn.lora_linear.a0.weight",
    ("dinov2", "blocks.0.attn.qkv"): "blocks.0.attn.lora_qkv.a0.weight",
    ("dinov2", "head"): "lora_head.a0.weight",
    ("falcon", "transformer.h.0.self_attention.dense"): "transformer.h.0.self_attention.lora_dense.a0.weight",
    ("falcon", "lm_head"): "lora_falcon.a0.weight",
    ("llama", "lm_head"): "lora_llama.a0.weight",
    ("llama", "model.layers.3.self_attn.v_proj"): "model.layers.3.self_attn.lora_llama_csa.a0.weight",
    ("llama", "model.layers.3.mlp.up_proj"): "model.layers.3.lora_llama_block.a0.weight",
    ("my_lora", "a.b"): "a.b.my_lora.a0.weight",
}


def peft(folder: Path, modules: Mapping[str, tuple[int, ...]], rank: int = 2) -> Path:
    tensors: dict[str, Tensor] = {}
    for number, (name, (out, into, *kernel)) in enumerate(modules.items()):
        tensors[f"base_model.model.{name}.lora_A.weight"] = random(number, rank, into, *kernel)
        tensors[f"base_model.model.{name}.lora_B.weight"] = random(number + 50, out, rank, *(1 for _ in kernel))
    return write_file(folder / "in.safetensors", tensors)


def base(folder: Path, modules: Mapping[str, tuple[int, ...]]) -> Path:
    return write_file(folder / "base.safetensors", {f"{name}.weight": zeros(shape) for name, shape in modules.items()})


@pytest.mark.parametrize(("case", "expected"), CASES.items(), ids=str)
def test_names_are_those_its_models_look_up(tmp_path: Path, case: tuple[str, str], expected: str) -> None:
    prefix, module = case
    modules = {module: (8, 6), "other.layer": (5, 5)}
    path = peft(tmp_path, {module: (8, 6)})
    done = inweave.convert(
        path, tmp_path / "o.safetensors", to="candle", base=base(tmp_path, modules), alpha=4, prefix=prefix
    )
    written = inweave.load(done.path)
    assert set(written.tensors) == {expected, expected.replace("a0", "b0")}
    verdict = inweave.check(written, base(tmp_path, modules))
    assert verdict.ok and written.entries[0].factors.scale == 2.0
    assert verdict.report.modules == 1
    plan = inweave.resolve(written, base(tmp_path, modules))
    assert plan.placements[0].tensor == f"{module}.weight"


def test_several_layers_of_one_struct_come_back_to_their_modules(tmp_path: Path) -> None:
    names = ("self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.gate_proj")
    modules = {f"model.layers.{n}.{name}": (6, 6) for n in (0, 10, 2) for name in names} | {
        "model.embed_tokens": (9, 6)
    }
    path, folder = peft(tmp_path, {k: v for k, v in modules.items() if "embed" not in k}), base(tmp_path, modules)
    done = inweave.convert(
        path, tmp_path / "c.safetensors", to="candle", base=folder, alpha=2, prefix="llama", dummy_embeddings=True
    )
    written = inweave.load(done.path)
    assert {k.rpartition(".")[0].rpartition(".")[2] for k in written.tensors if "layers.10.self_attn" in k} == {
        "a0",
        "a1",
        "a2",
        "b0",
        "b1",
        "b2",
    }
    assert written.tensors["lora_llama.a0.weight"].shape == (2, 9)
    assert not any(written.tensors["lora_llama.b0.weight"].data)
    assert any("hash map" in note for note in done.notes)
    assert inweave.check(written, folder).ok
    inweave.convert(done.path, tmp_path / "back", to="peft", base=folder)
    source, back = inweave.load(path), inweave.load(tmp_path / "back")
    assert all(back.tensors[key].same(tensor) for key, tensor in source.tensors.items())


def test_a_conv1d_is_written_in_its_layout(tmp_path: Path) -> None:
    modules = {"conv": (8, 6, 1)}
    done = inweave.convert(
        peft(tmp_path, modules), tmp_path / "o.safetensors", to="candle", base=base(tmp_path, modules), alpha=2
    )
    written = inweave.load(done.path)
    assert {key: tensor.shape for key, tensor in written.tensors.items()} == {
        "conv.lora_conv1d.a0.weight": (2, 6), "conv.lora_conv1d.b0.weight": (8, 2),
    }  # fmt: skip
    assert inweave.check(written, base(tmp_path, modules)).ok
    with pytest.raises(TargetError, match="Conv1d"):
        modules = {"conv": (8, 6, 3)}
        inweave.convert(
            peft(tmp_path, modules), tmp_path / "o.safetensors", to="candle", base=base(tmp_path, modules), alpha=2
        )


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    path = peft(tmp_path, {"a": (3, 3)})
    for options in (
        {"to": "peft", "prefix": "llama"},
        {"to": "candle", "prefix": "a b"},
        {"to": "candle", "prefix": ".x"},
        {"to": "candle", "dummy_embeddings": True},
        {"to": "candle", "prefix": "llama", "dummy_embeddings": True},
    ):
        with pytest.raises(ConfigError):
            inweave.convert(path, tmp_path / "o.safetensors", base=base(tmp_path, {"a": (3, 3)}), **options)  # type: ignore[arg-type]


def converted(modules: Mapping[str, tuple[int, ...]], prefix: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the output of candle-lora's converters: modules sorted as text, numbered, per group if typed."""
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for number, name in enumerate(sorted(modules)):
        leaf = name.rpartition(".")[2]
        typed = ("lora_llama" if leaf in ("embed_tokens", "lm_head") else "lora_llama_csa" if ".self_attn." in name
                 else "lora_llama_block")  # fmt: skip
        path = prefix or typed
        identity = counts[path] = counts.get(path, -1) + 1
        out, into = modules[name]
        tensors[f"{path}.a{identity}.weight"] = random(number, 2, into)
        tensors[f"{path}.b{identity}.weight"] = random(number + 99, out, 2)
        names[f"{path}.a{identity}.weight"] = f"{name}.weight"
    return tensors, names


SHAPES = {
    "self_attn.q_proj": (6, 6),
    "self_attn.k_proj": (2, 6),
    "self_attn.v_proj": (2, 6),
    "self_attn.o_proj": (6, 6),
    "mlp.gate_proj": (9, 6),
    "mlp.up_proj": (9, 6),
    "mlp.down_proj": (6, 9),
}
LLAMA = {f"model.layers.{n}.{name}": shape for n in range(12) for name, shape in SHAPES.items()}
LLAMA |= {"model.embed_tokens": (11, 6), "lm_head": (11, 6)}


@pytest.mark.parametrize("prefix", [None, "lora_llama_csa", "my_prefix"])
def test_what_the_peft_converters_write_is_read_where_one_reading_fits(tmp_path: Path, prefix: str | None) -> None:
    folder = base(tmp_path, LLAMA)
    attention = {name: shape for name, shape in LLAMA.items() if ".self_attn." in name}
    mlp = {name: shape for name, shape in LLAMA.items() if name.endswith("down_proj")}
    modules = attention if prefix else attention | mlp
    tensors, names = converted(modules, prefix)
    adapter = inweave.load(write_file(tmp_path / "c.safetensors", tensors), alpha=2)
    plan = inweave.resolve(adapter, folder)
    assert {placement.keys[0]: placement.tensor for placement in plan.placements} == names
    inweave.convert(tmp_path / "c.safetensors", tmp_path / "peft", to="peft", base=folder, alpha=2)
    assert len(inweave.load(tmp_path / "peft")) == len(modules)


def test_numbers_that_fit_several_sets_of_layers_are_not_guessed(tmp_path: Path) -> None:
    modules = {name: shape for name, shape in LLAMA.items() if name.endswith(("k_proj", "o_proj"))}
    tensors, _ = converted(modules, None)  # k_proj and v_proj, q_proj and o_proj have the same shapes
    verdict = inweave.check(inweave.load(write_file(tmp_path / "c.safetensors", tensors)), base(tmp_path, LLAMA))
    assert not verdict.ok and len(verdict.report.unplaced) == len(modules)
    assert all("does not record which layer" in finding.reason for finding in verdict.report.unplaced)
