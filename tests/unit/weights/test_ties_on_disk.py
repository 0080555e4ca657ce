"""Language models whose head is their embedding: `check` says so, and `bake` refuses to change both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")


import inweave
from inweave.errors import TargetError
from tests.support import random, write


def base(folder: Path, config: dict[str, object] | None, head: bool = False) -> Path:
    tensors = {
        "model.embed_tokens.weight": random(1, 16, 8), "model.layers.0.self_attn.q_proj.weight": random(2, 8, 8),
        "model.layers.0.self_attn.v_proj.weight": random(5, 8, 8), "model.norm.weight": random(3, 8),
    }  # fmt: skip
    if head:
        tensors["lm_head.weight"] = random(4, 16, 8)
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return write(folder / "model.safetensors", tensors)


def adapter(folder: Path, module: str) -> Path:
    if module == "embed_tokens":
        names = {"lora_embedding_A": random(1, 2, 16), "lora_embedding_B": random(2, 8, 2)}
        return write(
            folder / "a.safetensors", {f"base_model.model.model.embed_tokens.{k}": v for k, v in names.items()}
        )
    out = 16 if module == "lm_head" else 8
    prefix = "base_model.model.lm_head" if module == "lm_head" else "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {"lora_A.weight": random(1, 2, 8), "lora_B.weight": random(2, out, 2)}
    return write(folder / "a.safetensors", {f"{prefix}.{k}": v for k, v in pair.items()})


TIED = {"tie_word_embeddings": True}
CASES = [
    (TIED, False, "embed_tokens", True),
    (TIED, True, "embed_tokens", True),
    (TIED, True, "lm_head", True),
    ({"text_config": TIED}, False, "embed_tokens", True),
    ({"architectures": ["LlamaForCausalLM"]}, False, "embed_tokens", True),
    (None, False, "embed_tokens", True),
    ({"tie_word_embeddings": False}, False, "embed_tokens", False),
    (None, True, "embed_tokens", False),
    (TIED, False, "q_proj", False),
]


@pytest.mark.parametrize(("config", "head", "module", "tied"), CASES)
@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
def test_a_tie_is_reported_and_refused(
    config: dict[str, object] | None, head: bool, module: str, tied: bool, whole: bool, tmp_path: Path
) -> None:
    file = base(tmp_path / "base", config, head)
    path = file.parent if whole else file
    lora = adapter(tmp_path, module)
    verdict = inweave.check(lora, path)
    assert verdict.report.placed == 2
    assert any("tied" in line for line in verdict.report.warnings) == tied
    out = tmp_path / ("out" if whole else "out.safetensors")
    if tied:
        with pytest.raises(TargetError, match="tied"):
            inweave.bake(path, [lora], out)
        assert not out.exists()
    else:
        assert inweave.bake(path, [lora], out).merged == 1


TABLES = {
    "bart": (
        "BartForConditionalGeneration",
        ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"],
    ),
    "t5": ("T5ForConditionalGeneration", ["shared", "encoder.embed_tokens"]),
    "bert": ("BertForMaskedLM", ["bert.embeddings.word_embeddings"]),
    "whisper": ("WhisperForConditionalGeneration", ["model.decoder.embed_tokens"]),
    "gpt2": ("GPT2LMHeadModel", ["wte"]),
}


@pytest.mark.parametrize(("name", "modules"), TABLES.values(), ids=TABLES.keys())
def test_every_tensor_of_a_tied_table_is_refused(name: str, modules: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [name]}))
    write(folder / "model.safetensors", {f"{module}.weight": random(1, 16, 8) for module in modules})
    for module in modules:
        factors = {"lora_embedding_A": random(1, 2, 16), "lora_embedding_B": random(2, 8, 2)}
        lora = write(tmp_path / "a.safetensors", {f"base_model.model.{module}.{k}": v for k, v in factors.items()})
        assert any(f"{module}.weight: tied" in line for line in inweave.check(lora, folder).report.warnings)
        with pytest.raises(TargetError, match=r"tied.*lm_head"):
            inweave.bake(folder, [lora], tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"thinker_config": {"text_config": TIED}}, True),
        ({"tie_word_embeddings": False, "llm_config": TIED}, True),
        ({"architectures": ["T5EncoderModel"]}, False),
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
    ],
)
def test_configurations_inside_of_configurations_tie_too(config: dict[str, object], tied: bool, tmp_path: Path) -> None:
    file = base(tmp_path / "base", config, head=False)
    warnings = inweave.check(adapter(tmp_path, "embed_tokens"), file.parent).report.warnings
    assert any("tied" in line for line in warnings) == tied
