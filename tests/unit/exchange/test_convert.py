"""`convert` lists every tensor that it does not carry over, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import inweave
from inweave.adapter import Tensor
from inweave.cli.app import app
from inweave.errors import TargetError
from inweave.formats.dialects import WRITTEN
from inweave.formats.files import write_file
from tests.support import random

SPELLINGS = {
    "diffusers": "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
    "sgm": "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
}


def pair(module: str, seed: int, out: int, into: int, rank: int = 4) -> dict[str, Tensor]:
    return {
        f"{module}.lora_down.weight": random(seed, rank, into),
        f"{module}.lora_up.weight": random(seed + 1, out, rank),
    }


@pytest.mark.parametrize("dialect", ["kohya", "comfy", "onetrainer", "diffusers"])
def test_a_module_under_two_names_is_listed(tmp_path: Path, dialect: str) -> None:
    tensors = pair(SPELLINGS["diffusers"], 1, 640, 640) | pair(SPELLINGS["sgm"], 5, 640, 640)
    path = write_file(tmp_path / "twice.safetensors", tensors)
    result = CliRunner().invoke(
        app, ["convert", str(path), str(tmp_path / "o.safetensors"), "--to", dialect, "--base", "sdxl", "--json"]
    )
    document = json.loads(result.output)
    assert result.exit_code == 0 and document["tensors"] == 2
    assert [sorted(row["keys"]) for row in document["dropped"]] == [sorted(pair(SPELLINGS["sgm"], 5, 640, 640))]
    assert "duplicate" in document["dropped"][0]["reason"]


@pytest.mark.parametrize("dialect", ["kohya", "comfy", "onetrainer", "diffusers", "bfl"])
def test_fused_and_split_forms_of_one_module_are_listed(tmp_path: Path, dialect: str) -> None:
    block = "diffusion_model.double_blocks.0.img_attn.qkv"
    fused = {f"{block}.lora_A.weight": random(1, 4, 3072), f"{block}.lora_B.weight": random(2, 9216, 4)}
    split: dict[str, Tensor] = {}
    for number, part in enumerate(("to_q", "to_k", "to_v")):
        module = f"transformer.transformer_blocks.0.attn.{part}"
        split |= {f"{module}.lora_A.weight": random(7 + number, 4, 3072), f"{module}.lora_B.weight": random(3, 3072, 4)}
    path = write_file(tmp_path / "twice.safetensors", fused | split)
    done = inweave.convert(path, tmp_path / "o.safetensors", to=dialect, base="flux1-dev")
    assert [sorted(lost.keys) for lost in done.lost] == [sorted(fused)]
    written = inweave.load(tmp_path / "o.safetensors")
    assert inweave.check(written, "flux1-dev").ok


@pytest.mark.parametrize("dialect", sorted(WRITTEN))
def test_written_and_dropped_tensors_add_up(tmp_path: Path, dialect: str) -> None:
    tensors = pair(SPELLINGS["diffusers"], 1, 640, 640) | pair(SPELLINGS["sgm"], 5, 640, 640)
    tensors |= {
        "lora_unet_nosuch.lora_down.weight": random(1, 4, 8), "lora_unet_nosuch.lora_up.weight": random(1, 8, 4),
        "lora_unet_half.lora_up.weight": random(1, 8, 4), "bundle_emb.x": random(1, 4), "what": random(1, 2),
        "lora_unet_input_blocks_0_0.diff": random(1, 320, 4, 3, 3), f"{SPELLINGS['sgm']}.alpha": random(1),
    }  # fmt: skip
    path = write_file(tmp_path / "odd.safetensors", tensors)
    out = tmp_path / ("out" if dialect == "peft" else "o.safetensors")
    if dialect == "bfl":
        with pytest.raises(TargetError):
            inweave.convert(path, out, to=dialect, base="sdxl", drop=True)
        return
    done = inweave.convert(path, out, to=dialect, base="sdxl", drop=True)
    dropped = [key for lost in done.lost for key in lost.keys]
    assert len(dropped) == len(set(dropped))
    assert {"what", "lora_unet_half.lora_up.weight", "lora_unet_nosuch.lora_up.weight"} <= set(dropped)
    assert done.tensors + len(dropped) == len(tensors)


@pytest.mark.parametrize("base", ["flux1-dev", "sd3.5-medium"])
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_attention_of_transformers_is_held_by_onetrainer(tmp_path: Path, base: str, kind: str) -> None:
    """Parts of a fused projection with separate factors cannot be joined, so the dialect needs names for parts."""
    tensors: dict[str, Tensor] = {}
    for number, name in enumerate(("to_q", "to_k", "to_v", "add_q_proj")):
        module = f"lora_transformer_transformer_blocks_0_attn_{name}"
        size = 3072 if base == "flux1-dev" else 1536
        if kind == "loha":
            shapes = {"w1_a": (size, 4), "w1_b": (4, size), "w2_a": (size, 4), "w2_b": (4, size)}
            tensors |= {f"{module}.hada_{role}": random(number, *shape) for role, shape in shapes.items()}
        else:
            tensors |= {
                f"{module}.lokr_w1": random(number, 16, 16),
                f"{module}.lokr_w2": random(9 + number, size // 16, size // 16),
            }
    path = write_file(tmp_path / "in.safetensors", tensors)
    out = tmp_path / "out.safetensors"
    with pytest.raises(TargetError, match="can be written as onetrainer"):
        inweave.convert(path, out, to="kohya", base=base)
    done = inweave.convert(path, out, to="onetrainer", base=base)
    assert done.tensors == len(tensors) and done.lost == []
    written = inweave.load(out)
    assert inweave.check(written, base).ok
    assert all(written.tensors[key].same(tensor) for key, tensor in tensors.items())
