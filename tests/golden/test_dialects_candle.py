"""candle-lora's dialect: every prefix its models use, with and without the dot, and information its files lack."""

from __future__ import annotations

from pathlib import Path

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import TargetError
from inweave.formats.files import write_file
from inweave.formats.read import read
from tests.golden.weave import close, numbers, product, torch_base
from tests.support import hollow, random

LLAMA = {
    "model.embed_tokens.weight": (32, 8),
    "lm_head.weight": (32, 8),
    "model.norm.weight": (8,),
    **{
        f"model.layers.{n}.{name}.weight": shape
        for n in range(2)
        for name, shape in {
            "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
            "input_layernorm": (8,),
        }.items()
    },
}  # fmt: skip
CANDLE = {
    "mistral": ("model.layers.0.self_attn.q_proj.traced_lora_linear", "model.layers.0.self_attn.q_proj", (8, 6)),
    "mistral embedding": ("model.embed_tokens.traced_lora_embed", "model.embed_tokens", (9, 6)),
    "stable_lm": ("model.layers.0.mlp.gate_proj.traced_lora_linear", "model.layers.0.mlp.gate_proj", (9, 6)),
    "t5": ("encoder.block.0.layer.0.SelfAttention.q.traced_lora_linear", "encoder.block.0.layer.0.SelfAttention.q",
        (8, 6)),
    "t5 embedding": ("shared.traced_lora_embed", "shared", (9, 6)),
    "mpt": ("transformer.blocks.0.attn.Wqkv.traced_lora_linear", "transformer.blocks.0.attn.Wqkv", (9, 6)),
    "blip": ("text_decoder.bert.encoder.layer.0.attention.self.query.traced_lora_linear",
             "text_decoder.bert.encoder.layer.0.attention.self.query", (8, 6)),
    "bert": ("bert.encoder.layer.0.attention.self.query.lora_linear", "bert.encoder.layer.0.attention.self.query",
        (8, 6)),
    "bert embedding": ("bert.embeddings.word_embeddings.lora_embed", "bert.embeddings.word_embeddings", (9, 6)),
    "bigcode": ("transformer.h.0.attn.c_attn.lora_linear", "transformer.h.0.attn.c_attn", (9, 6)),
    "dinov2 qkv": ("blocks.0.attn.lora_qkv", "blocks.0.attn.qkv", (18, 6)),
    "dinov2 proj": ("blocks.0.attn.lora_proj", "blocks.0.attn.proj", (6, 6)),
    "dinov2 fc1": ("blocks.0.mlp.lora_fc1", "blocks.0.mlp.fc1", (24, 6)),
    "dinov2 fc2": ("blocks.0.mlp.lora_fc2", "blocks.0.mlp.fc2", (6, 24)),
    "dinov2 head": ("lora_head", "head", (5, 6)),
    "falcon qkv": ("transformer.h.0.self_attention.lora_query_key_value",
        "transformer.h.0.self_attention.query_key_value", (8, 6)),
    "falcon dense": ("transformer.h.0.self_attention.lora_dense", "transformer.h.0.self_attention.dense", (6, 7)),
    "resnet": ("layer1.0.conv1.lora_conv2d", "layer1.0.conv1", (7, 5, 3, 3)),
    "plain path": ("net.blocks.0.proj", "net.blocks.0.proj", (8, 6)),
}  # fmt: skip


def candle(path: str, out: int, into: int, *kernel: int, identity: int = 0, rank: int = 2) -> dict[str, Tensor]:
    return {
        f"{path}a{identity}.weight": random(identity + 1, rank, into, *kernel),
        f"{path}b{identity}.weight": random(identity + 2, out, rank, *(1 for _ in kernel)),
    }


@pytest.mark.parametrize(
    ("kind", "dot"),
    # nothing marks the end of a plain path without the dot
    [(kind, dot) for kind in CANDLE for dot in (".", "") if (kind, dot) != ("plain path", "")],
)
def test_candle_prefixes(kind: str, dot: str) -> None:
    """The module is in the path; alpha is not recorded, and that is reported. Early files lack the dot."""
    path, module, shape = CANDLE[kind]
    shapes = {"net.other.weight": (3, 3), f"{module}.weight": shape}
    base = torch_base(shapes)
    embedding = "embed" in path.rpartition(".")[2]
    tensors = candle(path + dot, *(shape[::-1] if embedding else shape))
    adapter = read(tensors)
    assert adapter.dialects == ("candle",)
    assert any("candle" in warning and "alpha" in warning for warning in adapter.warnings)
    expected = product(tensors)
    close(base.changes(adapter)[f"{module}.weight"], expected.T if embedding else expected.reshape(shape))


@pytest.mark.parametrize("path", ["lora_llama.", "lora_llama", ".", ""])
def test_candle_root(path: str) -> None:
    """llama adapts its token embedding only; the root struct, with a name, without a dot, or with neither."""
    base = torch_base(LLAMA)
    tensors = candle(path, 8, 32)
    close(base.changes(tensors)["model.embed_tokens.weight"], product(tensors).T)


@pytest.mark.parametrize("dot", [".", ""])
def test_candle_structs_place_where_one_layer_fits(dot: str) -> None:
    base = torch_base(LLAMA)
    tensors = candle(f"model.layers.1.lora_llama_block{dot}", 8, 12)
    close(base.changes(tensors)["model.layers.1.mlp.down_proj.weight"], product(tensors))
    falcon = torch_base({"transformer.word_embeddings.weight": (9, 6), "transformer.h.0.mlp.dense.weight": (6, 6)})
    tensors = candle(f"lora_falcon{dot}", 6, 9)
    close(falcon.changes(tensors)["transformer.word_embeddings.weight"], product(tensors).T)


def test_candle_structs_report_what_the_file_does_not_record() -> None:
    """q and o of one shape, or several ids in one struct: their order was a hash map's."""
    base = torch_base(LLAMA)
    for tensors in (
        candle("model.layers.0.self_attn.lora_llama_csa.", 8, 8),
        candle("model.layers.0.self_attn.lora_llama_csa.", 8, 8)
        | candle("model.layers.0.self_attn.lora_llama_csa.", 4, 8, identity=1),
    ):
        plan = base.plan(tensors, strict=False)
        assert not plan.placements
        assert {key for finding in plan.report.unplaced for key in finding.keys} == set(tensors)
        assert all("does not record which layer" in finding.reason for finding in plan.report.unplaced)
        with pytest.raises(TargetError, match="does not record"):
            base.plan(tensors)


@pytest.mark.parametrize("prefix", ["lora_llama_csa", "lora_llama_block", "lora_llama", "adapter"])
def test_candle_flat_output_of_its_peft_converter(prefix: str) -> None:
    """No layer path, ids in the alphabetical order of lost names: readable, and no guess is made."""
    tensors: dict[str, Tensor] = {}
    for identity, shape in enumerate([(4, 8), (8, 8), (8, 8), (4, 8)]):
        tensors |= candle(f"{prefix}.", *shape, identity=identity)
    adapter = read(tensors)
    assert len(adapter) == 4
    assert not adapter.problems
    assert any("candle" in warning for warning in adapter.warnings)
    report = torch_base(LLAMA).plan(adapter, strict=False).report
    assert report.placed == 0
    assert {key for finding in report.unplaced for key in finding.keys} == set(tensors)


def test_candle_typed_output_with_dummy_embeddings() -> None:
    tensors = candle("lora_llama_csa.", 8, 8) | candle("lora_llama_block.", 12, 8)
    tensors |= {"lora_llama.a0.weight": hollow((4, 32000)), "lora_llama.b0.weight": hollow((2048, 4))}
    adapter = read(tensors)
    assert len(adapter) == 3
    report = torch_base(LLAMA).plan(adapter, strict=False).report
    assert report.placed == 0
    assert {key for finding in (*report.unplaced, *report.mismatched) for key in finding.keys} == set(tensors)


@pytest.mark.parametrize("name", ["m0", "magnitude0"])
def test_candle_dora_of_the_forks(name: str) -> None:
    path, module, shape = CANDLE["mistral"]
    base = torch_base({"net.other.weight": (3, 3), f"{module}.weight": shape})
    tensors, magnitude = candle(f"{path}.", *shape), random(9, 8)
    changed = base[f"{module}.weight"] + product(tensors)
    after = base.merged(tensors | {f"{path}.{name}.weight": magnitude})[f"{module}.weight"]
    close(after, changed / changed.norm(dim=1, keepdim=True) * numbers(magnitude)[:, None])


OWN = {
    "falcon": ("transformer.h.0.self_attention.dense", "transformer.h.0.self_attention.lora_dense"),
    "mpt": ("transformer.blocks.0.attn.Wqkv", "transformer.blocks.0.attn.Wqkv.traced_lora_linear"),
    "starcoder": ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn.lora_linear"),
    "dinov2": ("blocks.0.attn.qkv", "blocks.0.attn.lora_qkv"),
}


def _peft(folder: Path, *modules: str) -> Path:
    tensors: dict[str, Tensor] = {}
    for module in modules:
        tensors |= {
            f"base_model.model.{module}.lora_A.weight": random(1, 2, 6),
            f"base_model.model.{module}.lora_B.weight": random(2, 8, 2),
        }
    write_file(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    return folder


@pytest.mark.parametrize("model", OWN)
def test_a_models_own_layers_are_written_without_a_base(model: str, tmp_path: Path) -> None:
    module, path = OWN[model]
    out = tmp_path / "out.safetensors"
    done = inweave.convert(_peft(tmp_path, module), out, to="candle", prefix=model)
    assert sorted(inweave.load(out).tensors) == [f"{path}.a0.weight", f"{path}.b0.weight"]
    assert not any("q_proj" in note for note in done.notes)


@pytest.mark.parametrize(("model", "module"), [
    ("dinov2", "dinov2.encoder.layer.0.attention.attention.query"), ("resnet", "resnet.encoder.stages.0.layers.0.fc"),
    ("falcon", "transformer.h.0.mlp.dense_h_to_4h"), ("mpt", "transformer.blocks.0.attn.q_proj"),
])  # fmt: skip
def test_a_layer_that_the_model_never_looks_up_is_refused(model: str, module: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"candle-lora's {model} adapts no layer of this name"):
        inweave.convert(_peft(tmp_path, module), tmp_path / "out.safetensors", to="candle", prefix=model)


def test_the_note_names_the_layers_that_are_numbered(tmp_path: Path) -> None:
    file = _peft(tmp_path, "lm_head", "transformer.word_embeddings")
    done = inweave.convert(file, tmp_path / "out.safetensors", to="candle", prefix="falcon")
    (note,) = [note for note in done.notes if "numbered" in note]
    assert "lm_head, word_embeddings" in note and "q_proj" not in note
