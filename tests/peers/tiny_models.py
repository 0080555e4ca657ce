"""Whole diffusion models of every family, a few megabytes each: the published configurations with small sizes.

Only widths and depths differ from the models people use: classes, tokenizers, schedulers, activations and options are
those of the variant. Every parameter is random, biases and norms too, since a layer that starts at zero would hide
whatever goes wrong in it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from inweave.adapter import Tensor
from inweave.exchange.convert import rewrite
from inweave.formats.files import write_file
from inweave.models import bundled
from inweave.models import folder as reading
from inweave.models.families import network_classes
from inweave.models.variants import find_variant
from tests.peers import tiny_mistral, tiny_qwen
from tests.peers.models import adapter_from, index_of, random_lora

#: every variant whose structure differs from the others'
VARIANTS = (
    "sd1.5", "sd1.5-inpaint", "sd2.1", "sd2-inpaint", "sdxl", "sdxl-turbo", "sdxl-inpaint", "sd3-medium",
    "sd3.5-medium", "flux1-dev", "flux1-schnell", "flux1-kontext-dev", "flux2-dev", "flux2-klein-4b",
    "flux2-klein-base-4b", "z-image-turbo", "z-image", "qwen-image",
)  # fmt: skip
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_CLIPS = (transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection)

WIDTH, SECOND = 16, 24  # of the CLIPs: two that differ, so that no file fits the wrong one
_CLIP = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3,
         "projection_dim": WIDTH}  # fmt: skip
_VAE = {"block_out_channels": [4, 4, 8, 8], "layers_per_block": 1, "norm_num_groups": 2, "sample_size": 64}
_SD = {"block_out_channels": [8, 8, 16, 16], "cross_attention_dim": WIDTH, "layers_per_block": 1, "norm_num_groups": 4,
       "sample_size": 8}  # fmt: skip
_SDXL = {"block_out_channels": [8, 16, 16], "cross_attention_dim": WIDTH + SECOND, "attention_head_dim": [2, 2, 4],
         "layers_per_block": 2, "norm_num_groups": 4, "sample_size": 8, "transformer_layers_per_block": [1, 1, 2],
         "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + SECOND}  # fmt: skip
_SD3 = {"attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16, "num_layers": 3,
        "joint_attention_dim": WIDTH + SECOND, "pooled_projection_dim": WIDTH + SECOND, "pos_embed_max_size": 12,
        "sample_size": 8}  # fmt: skip
_FLUX = {"attention_head_dim": 8, "axes_dims_rope": [2, 2, 4], "num_attention_heads": 2, "num_layers": 2,
         "num_single_layers": 2, "joint_attention_dim": WIDTH + SECOND, "pooled_projection_dim": WIDTH}  # fmt: skip
_CHROMA = {name: _FLUX[name] for name in _FLUX if name != "pooled_projection_dim"} | {
    "approximator_hidden_dim": 16, "approximator_layers": 2, "approximator_num_channels": 16}  # fmt: skip
_FLUX2 = {"attention_head_dim": 8, "axes_dims_rope": [2, 2, 2, 2], "num_attention_heads": 2, "num_layers": 2,
          "num_single_layers": 2, "joint_attention_dim": 3 * tiny_qwen.WIDTH, "in_channels": 16}  # fmt: skip
_Z_IMAGE = {"dim": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "n_refiner_layers": 1, "axes_dims": [4, 2, 2],
            "cap_feat_dim": tiny_qwen.WIDTH}  # fmt: skip
_QWEN_IMAGE = {"attention_head_dim": 8, "axes_dims_rope": [4, 2, 2], "num_attention_heads": 2, "num_layers": 2,
               "joint_attention_dim": tiny_qwen.WIDTH}  # fmt: skip
_VIDEO_VAE = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 2}
_T5 = {"d_model": WIDTH + SECOND, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}

_PIPELINES = {"sd": "StableDiffusion", "sdxl": "StableDiffusionXL", "sd3": "StableDiffusion3", "flux": "Flux",
              "chroma": "Chroma",
              "flux2": "Flux2", "flux2-klein": "Flux2Klein", "z-image": "ZImage",
              "qwen-image": "QwenImage", "qwen-image-edit": "QwenImageEditPlus"}  # fmt: skip
_TOKENIZERS: dict[str, Any] = {}
_KEEP = tempfile.TemporaryDirectory(prefix="inweave-tiny-")  # until the process ends


@cache
def folder(variant: str) -> Path:
    """A model of this variant as diffusers saves it."""
    path = Path(_KEEP.name) / f"tiny-{variant}"
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    saved = pipeline(variant)
    if hasattr(saved, "processor"):  # of texts and images; its tokenizer is saved too
        saved = type(saved)(**saved.components | {"processor": None})
    saved.save_pretrained(path, safe_serialization=True)
    if variant == "flux2-dev":  # published with a processor for images, which needs a library that is not here
        index = json.loads((path / "model_index.json").read_text())
        index["tokenizer"] = ["transformers", "PixtralProcessor"]
        (path / "model_index.json").write_text(json.dumps(index))
    return path


@cache
def pipeline(variant: str) -> Any:
    """The pipeline that is saved; it must not be changed."""
    known = find_variant(variant)
    assert known is not None
    parts: dict[str, Any] = {}
    for number, part in enumerate(bundled.folders(variant)):
        class_name, config = bundled.component_config(variant, part)
        if part.startswith("tokenizer"):
            parts[part] = tokenizer(variant, part)
        elif part == "scheduler":
            parts[part] = getattr(diffusers, class_name).from_config(config)
        else:
            parts[part] = _network(class_name, config | _small(variant, part, class_name), 100 * len(variant) + number)
    kind = known.pipeline or _PIPELINES[known.family] + ("InpaintPipeline" if known.inpaint else "Pipeline")
    if known.family == "sd":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if known.family == "qwen-image-edit":
        parts["processor"] = tiny_qwen.Processor()
    if known.family == "flux2-klein":
        parts["is_distilled"] = known.guidance == 0.0
    made = getattr(diffusers, kind)(**parts)
    if known.family == "qwen-image-edit":
        tiny_qwen.pass_kinds(made)
    return made


def tokenizer(variant: str, part: str) -> Any:
    """There are five: two of CLIP that differ in their padding, T5's, and Qwen's and Mistral's, which are made here."""
    config = str(bundled.component_config(variant, part))
    if config not in _TOKENIZERS:
        class_name, _ = bundled.component_config(variant, part)
        bundled_one = bundled.has_vocabulary(class_name)
        _TOKENIZERS[config] = bundled.tokenizer(variant, part) if bundled_one else _made_here(class_name)
    return _TOKENIZERS[config]


def _made_here(class_name: str) -> Any:
    return tiny_mistral.tokenizer() if class_name == "PixtralProcessor" else tiny_qwen.tokenizer()


@contextmanager
def quick_tokenizers() -> Iterator[None]:
    """Reading a vocabulary takes longer than all else in a tiny model, and there are three: each is read once."""
    real = reading._tokenizer

    def remembered(folder: Path, class_name: str) -> Any:
        pad = json.loads((folder / "tokenizer_config.json").read_text())["pad_token"]
        sizes = sorted((file.name, file.stat().st_size) for file in folder.iterdir())
        key = f"{class_name} {pad} {sizes}"
        if key not in _TOKENIZERS:
            _TOKENIZERS[key] = real(folder, class_name)
        return _TOKENIZERS[key]

    reading._tokenizer = remembered
    try:
        yield
    finally:
        reading._tokenizer = real


def _small(variant: str, part: str, class_name: str) -> dict[str, Any]:
    if class_name == "UNet2DConditionModel":
        heads = {"attention_head_dim": [2, 2, 4, 4]} if variant.startswith("sd2") else {"attention_head_dim": 2}
        return _SDXL if variant.startswith("sdxl") else _SD | heads
    if class_name == "SD3Transformer2DModel":
        return _SD3 | ({"dual_attention_layers": [0, 1]} if variant == "sd3.5-medium" else {})
    sizes: dict[str, dict[str, Any]] = {"AutoencoderKL": _VAE, "FluxTransformer2DModel": _FLUX,
             "ChromaTransformer2DModel": _CHROMA, "T5EncoderModel": _T5,
             "ZImageTransformer2DModel": _Z_IMAGE, "Qwen3Model": tiny_qwen.QWEN3,
             "QwenImageTransformer2DModel": _QWEN_IMAGE, "AutoencoderKLQwenImage": _VIDEO_VAE,
             "Qwen2_5_VLForConditionalGeneration": tiny_qwen.QWEN2_5 | {"image_token_id": tiny_qwen.image_token()},
             "Flux2Transformer2DModel": _FLUX2,
             "AutoencoderKLFlux2": _VAE | {"latent_channels": 4}, "Mistral3ForConditionalGeneration":
             tiny_mistral.MISTRAL, "Qwen3ForCausalLM": tiny_qwen.QWEN3 | {"num_hidden_layers": 28}}  # fmt: skip
    second = {"hidden_size": SECOND, "projection_dim": SECOND} if part == "text_encoder_2" else {}
    return sizes.get(class_name, _CLIP | second)


def _network(class_name: str, config: dict[str, Any], seed: int) -> torch.nn.Module:
    if network_classes()[class_name].library == "diffusers":
        network = getattr(diffusers, class_name).from_config(config)
    else:
        kind = getattr(transformers, class_name)
        network = kind(kind.config_class.from_dict(config))
    randomise(network, seed)
    return network.eval()


def randomise(network: torch.nn.Module, seed: int) -> None:
    """Numbers that keep the size of what passes through: every one matters, none overflows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise)
            elif "embed" in name and weight.shape[0] > 1000:  # a vocabulary
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise / weight[0].numel() ** 0.5)
        for norm in (module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.copy_(0.3 * torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.5 + torch.rand(norm.num_features, generator=generator))


def lora(folder: Path, variant: str, *, dialect: str, seed: int = 0, rank: int = 4) -> Path:
    """A LoRA on attention and feed-forward of the denoiser and of every CLIP, with an alpha of half its rank."""
    pipe = pipeline(variant)
    prefix = "unet." if hasattr(pipe, "unet") else "transformer."
    networks = {"unet": getattr(pipe, prefix[:-1])}
    tensors = random_lora(prefix, networks["unet"], _layer, alpha=rank / 2, ranks=(rank,))
    clips = {part: clip for part in ENCODERS if isinstance(clip := getattr(pipe, part, None), _CLIPS)}
    encoders: dict[str, Tensor] = {}  # encoders in kohya's dialect, which numbers them
    for number, (part, clip) in enumerate(clips.items(), 1):
        inside = getattr(clip, "text_model", clip)
        pairs = random_lora(f"{part}.text_model.", inside, _encoder_layer, alpha=rank / 2, ranks=(rank,))
        if dialect == "kohya":
            root = "lora_te" if len(clips) == 1 else f"lora_te{number}"
            encoders |= {_kohya(key.replace(part, root, 1)): value for key, value in pairs.items()}
        else:
            networks[f"te{number}"] = clip
            tensors |= pairs
    output = rewrite(adapter_from(tensors), dialect, index_of(**networks))
    assert not output.lost
    both = output.tensors | encoders
    stirred = {key: _stirred(value, seed, number) for number, (key, value) in enumerate(sorted(both.items()))}
    downs = ("lora_A.weight", "lora_down.weight")
    assert sum(key.endswith(downs) for key in stirred) == sum(key.endswith(downs) for key in (*tensors, *encoders))
    return write_file(folder, stirred, output.metadata)


def _kohya(key: str) -> str:
    module, _, leaf = key.replace("lora_A", "lora_down").replace("lora_B", "lora_up").rpartition(".lora_")
    if not module:
        module, leaf = key.removesuffix(".alpha"), ""
    return f"{module.replace('.', '_')}.{f'lora_{leaf}' if leaf else 'alpha'}"


def _layer(name: str) -> bool:
    return name.split(".")[-1] != "attn" and any(
        part in name for part in (".attn", ".ff", ".attention.", "feed", "_mlp.")
    )


def _encoder_layer(name: str) -> bool:
    return ".self_attn." in name or ".mlp." in name


def _stirred(tensor: Tensor, seed: int, number: int) -> Tensor:
    """Other numbers for every file and every tensor; an alpha stays what it is."""
    if not tensor.shape:
        return tensor
    numbers = np.random.default_rng((seed, number)).standard_normal(tensor.shape) * 0.35
    return Tensor("F32", tensor.shape, numbers.astype("<f4").tobytes())
