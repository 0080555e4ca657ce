"""Language models whose head is their embedding: `check` says so, and `bake` refuses to change both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import inweave  # noqa: E402
from inweave.errors import TargetError  # noqa: E402
from tests.support import random, write  # noqa: E402


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
