"""Files of other kinds are refused by name, with what to do; adapters that look a little like them are read."""

from __future__ import annotations

import time

import pytest

from inweave.errors import FormatError
from inweave.formats.foreign import foreign_kind
from inweave.formats.read import read
from tests.support import hollow, stopwatch

Shapes = dict[str, tuple[int, ...]]


def keys(*patterns: str, shape: tuple[int, ...] = (8, 8), count: int = 3) -> Shapes:
    """Each pattern once per number: `{i}` counts."""
    return {pattern.replace("{i}", str(i)): shape for pattern in patterns for i in range(count)}


MOTION = "down_blocks.{i}.motion_modules.0.temporal_transformer.transformer_blocks.0.attention_blocks.0"
FOREIGN: list[tuple[str, Shapes, str]] = [
    # words for the text encoder
    ("A1111", {"emb_params": (8, 768)}, "textual-inversion"),
    ("SDXL", {"clip_l": (8, 768), "clip_g": (8, 1280)}, "textual-inversion"),
    ("SD3", {"clip_l": (8, 768), "clip_g": (8, 1280), "t5xxl": (8, 4096)}, "textual-inversion"),
    ("old A1111", {"string_to_param.*": (8, 768)}, "textual-inversion"),
    ("diffusers", {"<my-cat>": (1, 768)}, "textual-inversion"),
    ("pivotal tuning", {"text_encoders_0": (2, 768), "text_encoders_1": (2, 1280)}, "textual-inversion"),
    ("DreamArtist", {"style-uc": (6, 768)}, "textual-inversion"),
    ("aesthetic embedding", {"aesthetic": (768,)}, "textual-inversion"),
    # image prompts and faces
    ("IP-Adapter", keys("image_proj.proj.weight", "ip_adapter.{i}.to_k_ip.weight", "ip_adapter.{i}.to_v_ip.weight"),
        "IP-Adapter"),
    ("IP-Adapter Plus", keys("image_proj.latents", "image_proj.layers.{i}.0.norm1.weight",
        "ip_adapter.{i}.to_k_ip.weight"), "IP-Adapter"),
    ("FaceID", keys("image_proj.norm.weight", "ip_adapter.{i}.to_q_lora.down.weight",
        "ip_adapter.{i}.to_q_lora.up.weight", "ip_adapter.{i}.to_k_ip.weight"), "FaceID"),
    ("XLabs", keys("double_blocks.{i}.processor.ip_adapter_double_stream_k_proj.weight",
        "ip_adapter_proj_model.norm.weight"), "IP-Adapter"),
    ("PuLID", keys("pulid_ca.{i}.to_q.weight", "pulid_encoder.body.{i}.weight"), "PuLID"),
    ("PuLID 1.1", keys("id_adapter.latents", "id_adapter_attn_layers.{i}.id_to_k.weight"), "PuLID"),
    ("PhotoMaker", keys("id_encoder.vision_model.encoder.layers.{i}.weight",
        "lora_weights.down_blocks.{i}.attn.to_q_lora.down.weight"), "PhotoMaker"),
    # conditions
    ("EasyControl", keys("transformer_blocks.{i}.attn.processor.q_loras.0.down.weight",
        "transformer_blocks.{i}.attn.processor.q_loras.0.up.weight"), "EasyControl"),
    ("EasyControl single", keys("single_transformer_blocks.{i}.attn.processor.v_loras.0.up.weight"), "EasyControl"),
    ("Stand-In", keys("diffusion_model.blocks.{i}.self_attn.q_loras.down.weight"), "Stand-In"),
    ("Control-LoRA", {"lora_controlnet": (), "input_blocks.0.0.weight": (8, 8)}, "Control-LoRA"),
    ("LLLite", keys("lllite_unet_input_blocks_{i}_1_transformer_blocks_0_attn1_to_q.down.0.weight"), "LLLite"),
    ("ControlNet", keys("control_model.input_blocks.{i}.0.weight", "control_model.zero_convs.{i}.0.weight"),
        "ControlNet"),
    ("ControlNet of diffusers", keys("controlnet_cond_embedding.conv_in.weight", "controlnet_down_blocks.{i}.weight",
        "down_blocks.{i}.resnets.0.conv1.weight"), "ControlNet"),
    ("ControlNet of Flux", keys("controlnet_blocks.{i}.weight", "transformer_blocks.{i}.attn.to_q.weight"),
        "ControlNet"),
    ("T2I-Adapter", keys("adapter.body.{i}.resnets.0.block1.weight", "adapter.conv_in.weight"), "T2I-Adapter"),
    ("T2I-Adapter of TencentARC", keys("body.{i}.block1.weight", "conv_in.weight"), "T2I-Adapter"),
    ("Redux", {"redux_up.weight": (12288, 1152), "redux_down.weight": (4096, 12288)}, "Redux"),
    ("hypernetwork", keys("768.{i}.linear.0.weight", "768.{i}.linear.0.bias"), "hypernetwork"),
    # video
    ("motion module", keys(f"{MOTION}.to_q.weight", f"{MOTION}.pos_encoder.pe"), "motion module"),
    ("motion module, wrapped", keys(f"module.{MOTION}.to_q.weight"), "motion module"),
    ("motion LoRA", keys(f"{MOTION}.processor.to_q_lora.down.weight", f"{MOTION}.processor.to_q_lora.up.weight"),
        "motion LoRA"),
    ("motion LoRA of diffusers",
        keys("unet.down_blocks.{i}.motion_modules.0.transformer_blocks.0.attn1.to_q.lora_A.weight"), "motion LoRA"),
    ("motion LoRA of kohya",
        keys("lora_unet_down_blocks_{i}_motion_modules_0_transformer_blocks_0_attn1_to_q.lora_down.weight"),
        "motion LoRA"),
    # packed for one kernel or one library
    ("nunchaku LoRA", keys("transformer_blocks.{i}.qkv_proj.lora_down",
        "transformer_blocks.{i}.mlp_context_fc1.lora_up"), "nunchaku"),
    ("nunchaku model", keys("transformer_blocks.{i}.qkv_proj.qweight", "transformer_blocks.{i}.qkv_proj.wscales",
        "transformer_blocks.{i}.qkv_proj.smooth_orig"), "nunchaku"),
    ("nunchaku Qwen", keys("transformer_blocks.{i}.attn.to_qkv.qweight",
        "transformer_blocks.{i}.attn.to_qkv.wcscales"), "nunchaku"),
    ("mlx-lm", keys("model.layers.{i}.self_attn.q_proj.lora_a", "model.layers.{i}.self_attn.q_proj.lora_b"), "MLX"),
    ("MLX model", keys("model.layers.{i}.mlp.up_proj.weight", "model.layers.{i}.mlp.up_proj.scales",
        "model.layers.{i}.mlp.up_proj.biases"), "MLX"),
    ("GPTQ", keys("model.layers.{i}.mlp.up_proj.qweight", "model.layers.{i}.mlp.up_proj.g_idx"), "GPTQ"),
    ("AWQ", keys("model.layers.{i}.mlp.up_proj.qweight", "model.layers.{i}.mlp.up_proj.qzeros"), "AWQ"),
    ("bitsandbytes", keys("model.layers.{i}.mlp.up_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"), "bitsandbytes"),
    # PEFT's other methods
    ("AdaLoRA", keys("base_model.model.h.{i}.c_attn.lora_A", "base_model.model.h.{i}.c_attn.lora_E"), "AdaLoRA"),
    ("prompt tuning", {"prompt_embeddings": (20, 8)}, "prompt-tuning"),
    ("FourierFT", keys("base_model.model.h.{i}.c_attn.fourierft_spectrum"), "FourierFT"),
    # whole models
    ("SD 1.5", keys("model.diffusion_model.input_blocks.{i}.0.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.{i}.mlp.fc1.weight",
        "first_stage_model.decoder.conv_in.weight"), "Stable Diffusion"),
    ("SDXL", keys("model.diffusion_model.input_blocks.{i}.0.weight",
        "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight"), "SDXL"),
    ("Flux", keys("double_blocks.{i}.img_attn.qkv.weight", "img_in.weight"), "FLUX"),
    ("Flux, prefixed", keys("model.diffusion_model.double_blocks.{i}.img_attn.qkv.weight"), "FLUX"),
    ("SD3", keys("model.diffusion_model.joint_blocks.{i}.x_block.attn.qkv.weight"), "Stable Diffusion 3"),
    ("Wan", keys("blocks.{i}.self_attn.q.weight", "blocks.{i}.self_attn.q.bias"), "Wan"),
    ("UNet", keys("down_blocks.{i}.resnets.0.conv1.weight"), "UNet"),
    ("VAE", keys("encoder.down_blocks.{i}.resnets.0.conv1.weight", "decoder.conv_in.weight", "quant_conv.weight"),
        "VAE"),
    ("Wan VAE", keys("encoder.downsamples.{i}.residual.0.weight", "decoder.conv1.weight"), "VAE"),
    ("CLIP", keys("text_model.encoder.layers.{i}.mlp.fc1.weight"), "CLIP text encoder"),
    ("CLIP vision", keys("vision_model.encoder.layers.{i}.mlp.fc1.weight"), "CLIP vision"),
    ("T5", keys("encoder.block.{i}.layer.0.SelfAttention.q.weight"), "T5"),
    ("LLM", keys("model.layers.{i}.self_attn.q_proj.weight", "lm_head.weight"), "language model"),
    ("ESRGAN", keys("model.1.sub.{i}.RDB1.conv1.0.weight", "model.0.weight"), "upscaler"),
    ("RealESRGAN", keys("body.{i}.rdb1.conv1.weight", "conv_first.weight"), "upscaler"),
    ("anything else", keys("stem.{i}.weight", "stem.{i}.bias"), "model checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "name"), [row[1:] for row in FOREIGN], ids=[row[0] for row in FOREIGN])
def test_another_kind_of_file_is_refused_by_name(shapes: Shapes, name: str) -> None:
    with pytest.raises(FormatError, match=name) as refusal:
        read({key: hollow(shape) for key, shape in shapes.items()})
    assert len(str(refusal.value)) > 60  # what it is and what to do


def pair(module: str, suffixes: tuple[str, str] = ("lora_A.weight", "lora_B.weight")) -> Shapes:
    return {f"{module}.{suffixes[0]}": (4, 320), f"{module}.{suffixes[1]}": (320, 4)}


ADAPTERS: list[tuple[str, Shapes]] = [
    ("B-LoRA", pair("unet.up_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        ("lora.down.weight", "lora.up.weight"))),
    ("slider", pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
        ("lora_down.weight", "lora_up.weight"))),
    ("FaceID's own LoRA", pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
        ("lora_down.weight", "lora_up.weight"))),
    ("AnimateDiff's domain adapter", pair("module.down_blocks.0.attentions.0.transformer_blocks.0.attn1",
        ("processor.to_q_lora.down.weight", "processor.to_q_lora.up.weight"))),
    ("with an embedding",
        pair("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")
        | {"bundle_emb.word.string_to_param.*": (8, 768)}),
    ("one module", pair("transformer.transformer_blocks.0.attn.to_q")),
    ("XLabs", pair("double_blocks.0.processor.qkv_lora1", ("down.weight", "up.weight"))),
]  # fmt: skip


@pytest.mark.parametrize("shapes", [row[1] for row in ADAPTERS], ids=[row[0] for row in ADAPTERS])
def test_an_adapter_is_no_other_kind(shapes: Shapes) -> None:
    adapter = read({key: hollow(shape) for key, shape in shapes.items()})
    assert len(adapter) == 1
    assert not adapter.problems


def test_recognizing_a_kind_costs_little() -> None:
    shapes = keys(
        *(f"lora_unet_blocks_{{i}}_{name}.{leaf}.weight" for name in "qkvo" for leaf in ("lora_down", "lora_up")),
        count=2000,
    )
    tensors = {key: hollow((4, 4)) for key in shapes}
    with stopwatch(time.process_time) as cost:
        assert foreign_kind(tensors, {}) is None
    assert cost.seconds < 0.2
