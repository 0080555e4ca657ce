"""Stable Diffusion 3 and 3.5: a transformer that sees the states of two CLIPs and T5 as one sequence.

    states  [CLIPs joined along the width, padded to T5's width | T5, or zeros where the model has none]
    pooled  of both CLIPs

Single files name their blocks `joint_blocks`: 24 of them are SD3 medium, with `x_block.attn2` SD3.5 medium; 38 are
SD3.5 large. Trained by flow matching with logit-normal timesteps and a shift of 3; adapters are trained on the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import IMAGE_PRESET, ConditioningRequest, ModelView, Network, Shape, Tensors, Variant
from inweave.models.families.clip import CLIP_TOKENIZERS, T5_TOKENIZERS, ClipFamily

if TYPE_CHECKING:
    from torch import Tensor


_STABILITY = "stabilityai/stable-diffusion"
#: (blocks, whether some attend twice) -> base
_DEPTHS = {(24, False): "sd3-medium", (24, True): "sd3.5-medium", (38, False): "sd3.5-large"}


class StableDiffusion3(ClipFamily):
    name = "sd3"
    networks = (
        Network("transformer", "SD3Transformer2DModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "CLIPTextModelWithProjection", "transformers"),
        Network("text_encoder_2", "CLIPTextModelWithProjection", "transformers"),
        Network("text_encoder_3", "T5EncoderModel", "transformers", required=False),
    )
    tokenizers = (*CLIP_TOKENIZERS, *T5_TOKENIZERS)
    trainable_encoders = ("text_encoder", "text_encoder_2")
    frozen_encoders = ("text_encoder_3",)
    variants = (
        Variant("sd3-medium", "sd3", f"{_STABILITY}-3-medium-diffusers", 1024, 28, 4.5, "flow"),
        Variant("sd3.5-medium", "sd3", f"{_STABILITY}-3.5-medium", 1024, 28, 4.5, "flow"),
        Variant("sd3.5-large", "sd3", f"{_STABILITY}-3.5-large", 1024, 28, 4.5, "flow"),
        Variant("sd3.5-large-turbo", "sd3", f"{_STABILITY}-3.5-large-turbo", 1024, 4, 0.0, "flow", base="sd3.5-large",
                mark="turbo", aliases=("sd3.5-turbo", "sd35-large-turbo")),
    )  # fmt: skip
    table = "sd3"
    single_file = "SD3 (joint_blocks)"
    flow = True
    latent_patch = 2
    steps = 28
    guidance = 4.5
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sd3": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "shift", "timestep_shift": 3.0}
    }
    timesteps = "logit_normal"
    compile_saving = 0.015  # SD 3.5 Large: 200 ms recorded, 185 compiled as well; others were not measured
    attention = (r"to_[qkv]", r"to_out\.0", r"add_[qkv]_proj", r"to_add_out")
    feed_forward = (r"ff(_context)?\.net\.\d+(\.proj)?",)
    pipeline = "StableDiffusion3Pipeline"

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "SD3Transformer2DModel"

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        depth = len({name.split(".", 2)[1] for name in tensors if name.startswith("joint_blocks.")})
        twice = any(".x_block.attn2." in name for name in tensors)
        blocks = f"joint_blocks of depth {depth} {'with' if twice else 'without'} x_block.attn2"
        if (depth, twice) not in _DEPTHS:
            raise FormatError(
                f"SD3: {blocks}; known are depth 24 (SD3 medium), 24 with attn2 (SD3.5 medium), 38 (SD3.5 large)"
            )
        base = _DEPTHS[depth, twice]
        return base, [f"{blocks}: {base}"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "sd3", "stable-diffusion-3"

    def t5_length(self, model: ModelView) -> int:
        return 256

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        import torch

        clip, pooled = self.clip_states(model, ids, clip_skip, weights)
        width = model.denoiser.config.joint_attention_dim
        clip = torch.nn.functional.pad(clip, (0, width - clip.shape[-1]))
        t5 = self.t5_states(model, ids, weights)
        t5 = clip.new_zeros(len(clip), self.t5_length(model), width) if t5 is None else t5.to(clip.dtype)
        return {"encoder_hidden_states": torch.cat([clip, t5], 1), "pooled_projections": torch.cat(pooled, -1)}

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        if "text_encoder_3" in model.networks:
            return []
        return ["this model has no T5 text encoder; the prompt goes through CLIP only"]

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        prediction: Tensor = model.denoiser(
            hidden_states=latents, timestep=t.expand(latents.shape[0]), return_dict=False, **inputs
        )[0]
        return prediction


SD3 = StableDiffusion3()
