"""Stable Diffusion XL: a UNet that attends to two CLIPs and is conditioned on sizes and crops.

    denoiser(latents, t, encoder_hidden_states, {text_embeds, time_ids})
    time_ids = (height, width of the original, top, left of the crop, height, width of the result)

An empty negative prompt means zeros, not the states of an empty text, where the model's index asks for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.models.families.base import IMAGE_PRESET, ConditioningRequest, ModelView, Network, Tensors, Variant
from inweave.models.families.clip import CLIP_TOKENIZERS
from inweave.models.families.sd import ABSENT, UNetFamily

if TYPE_CHECKING:
    from torch import Tensor


class StableDiffusionXL(UNetFamily):
    name = "sdxl"
    networks = (
        Network("unet", "UNet2DConditionModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "CLIPTextModel", "transformers"),
        Network("text_encoder_2", "CLIPTextModelWithProjection", "transformers"),
    )
    tokenizers = CLIP_TOKENIZERS
    trainable_encoders = ("text_encoder", "text_encoder_2")
    sized = True
    variants = (
        Variant("sdxl", "sdxl", "stabilityai/stable-diffusion-xl-base-1.0", 1024, 20, 7.5),
        Variant("sdxl-turbo", "sdxl", "stabilityai/sdxl-turbo", 512, 4, 0.0, base="sdxl", mark="turbo",
                aliases=("turbo", "sd-xl-turbo")),
        Variant("sdxl-inpaint", "sdxl", "diffusers/stable-diffusion-xl-1.0-inpainting-0.1", 1024, 20, 7.5,
                inpaint=True),
    )  # fmt: skip
    inpaint_variants: ClassVar[Mapping[str, str]] = {"sdxl": "sdxl-inpaint"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sdxl": {
            **IMAGE_PRESET,
            "resolution": 1024,
            # evens out the steps, so that faces and composition are trained at one pace
            "min_snr_gamma": 5.0,
            # SDXL's own last stage was trained with offset noise (0.05); an adapter trained without any slowly takes
            # the dark and the light ends away again. This keeps them, and is too weak to shift a short run's
            # brightness.
            "noise_offset": 0.0357,
            "text_encoder_learning_rate": 1e-5,
        }
    }
    pipeline = "StableDiffusionXLPipeline"
    inpaint_pipeline = "StableDiffusionXLInpaintPipeline"
    index_options: ClassVar[Mapping[str, Any]] = {
        "feature_extractor": ABSENT, "image_encoder": ABSENT, "force_zeros_for_empty_prompt": True,
    }  # fmt: skip
    inpaint_index_options: ClassVar[Mapping[str, Any]] = {"requires_aesthetics_score": False}

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "UNet2DConditionModel" and config.get("addition_embed_type") == "text_time"

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "sdxl_base_v1-0", "stable-diffusion-xl-v1-base"

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        hidden, pooled = self.clip_states(model, ids, clip_skip, weights)
        return {"encoder_hidden_states": hidden, "text_embeds": pooled[-1]}

    def negative_text(self, model: ModelView, request: ConditioningRequest, negative: Tensors) -> Tensors:
        if request.negative or not model.blueprint.settings.get("force_zeros_for_empty_prompt", True):
            return negative
        return {name: value.new_zeros(value.shape) for name, value in negative.items()}

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        inputs = super().batch_inputs(model, text, sizes, latents, guidance)
        return inputs | {"time_ids": sizes}  # training has them in float32: bfloat16 steps from 1024 to 1032


SDXL = StableDiffusionXL()
