"""A LoRA on the language model that encodes prompts, beside the one on the denoiser or alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.adapter import Adapter
from inweave.exchange.check import check
from inweave.exchange.convert import convert
from inweave.exchange.load import load
from inweave.formats.files import write_file
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.detect import detect
from inweave.targets.resolve import resolve
from tests.support import hollow, zeros

Shapes = dict[str, tuple[int, ...]]


def lora(module: str, out: int, width: int) -> Shapes:
    return {f"{module}.lora_down.weight": (4, width), f"{module}.lora_up.weight": (out, 4)}


def adapter_of(shapes: Shapes) -> Adapter:
    return read({key: hollow(shape) for key, shape in shapes.items()})


QWEN_IMAGE = {
    key: shape
    for block in range(60)
    for leaf in ("attn.to_q", "attn.add_k_proj")
    for key, shape in lora(f"transformer.transformer_blocks.{block}.{leaf}", 3072, 3072).items()
}
PREFIXES = (
    "text_encoder.model.layers.", "text_encoder.model.language_model.layers.", "text_encoder.language_model.layers.",
    "text_encoder.layers.", "text_encoders.qwen25_7b.transformer.model.layers.", "lora_te_layers_",
    "lora_te1_model_layers_",
    "lora_te_model_language_model_layers_", "text_encoder.base_model.model.model.layers.",
)  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_beside_qwen_image(prefix: str) -> None:
    shapes = dict(QWEN_IMAGE)
    for layer in range(28):
        for leaf, rows in (("self_attn.q_proj", 3584), ("self_attn.v_proj", 512), ("mlp.up_proj", 18944)):
            name = f"{prefix}{layer}.{leaf}"
            shapes |= lora(name.replace(".", "_") if prefix.startswith("lora_") else name, rows, 3584)
    adapter = adapter_of(shapes)
    plan = resolve(adapter, known_index("qwen-image"))
    assert {p.component for p in plan.placements} == {"unet", "te1"}
    assert plan.report.placed == len(shapes)
    detection = detect(adapter)
    assert (detection.base, detection.confidence) == ("qwen-image", 1)


@pytest.mark.parametrize(("base", "module", "shape"), [
    ("z-image-turbo", "text_encoder.model.layers.35.self_attn.q_proj", (4096, 2560)),
    ("anima", "lora_te_layers_27_mlp_down_proj", (1024, 3072)),
    ("lumina2", "lora_te_layers_25_self_attn_k_proj", (1024, 2304)),
    ("flux2-klein-4b", "text_encoders.qwen3_4b.transformer.model.layers.0.self_attn.o_proj", (2560, 4096)),
])  # fmt: skip
def test_other_language_encoders(base: str, module: str, shape: tuple[int, int]) -> None:
    plan = resolve(adapter_of(lora(module, *shape)), known_index(base))
    assert [p.component for p in plan.placements] == ["te1"]


def test_a_text_encoder_that_is_not_known_says_nothing_about_the_base() -> None:
    """HunyuanVideo reads prompts with a Llama, whose tensors are not listed: they are named, and the base is
    detected.
    """
    shapes: Shapes = {}
    for block in range(40):
        shapes |= lora(f"transformer.single_transformer_blocks.{block}.attn.to_q", 3072, 3072)
    for block in range(20):
        shapes |= lora(f"transformer.transformer_blocks.{block}.attn.add_q_proj", 3072, 3072)
    for layer in range(200):
        shapes |= lora(f"text_encoder.model.layers.{layer}.self_attn.q_proj", 4096, 4096)
    adapter = adapter_of(shapes)
    assert detect(adapter).base == "hunyuanvideo"
    verdict = check(adapter, "hunyuanvideo", values="none")
    assert not verdict.ok
    names = {key for finding in verdict.report.unplaced for key in finding.keys}
    assert names == {key for key in shapes if key.startswith("text_encoder.")}


@pytest.mark.parametrize(("dialect", "key"), [
    ("kohya", "lora_te_model_layers_0_self_attn_q_proj.lora_down.weight"),
    ("diffusers", "text_encoder.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ("comfy", "text_encoders.qwen25_7b.transformer.model.layers.0.self_attn.q_proj.lora_down.weight"),
])  # fmt: skip
def test_converting_keeps_the_encoder(dialect: str, key: str, tmp_path: Path) -> None:
    shapes = lora("transformer.transformer_blocks.0.attn.to_q", 3072, 3072)
    shapes |= lora("text_encoder.model.layers.0.self_attn.q_proj", 3584, 3584)
    source = write_file(tmp_path / "in.safetensors", {name: zeros(shape) for name, shape in shapes.items()})
    convert(source, tmp_path / "out.safetensors", to=dialect, base="qwen-image")
    again = load(tmp_path / "out.safetensors")
    assert key in again.tensors
    assert resolve(again, known_index("qwen-image")).report.clean
