"""Stable Diffusion 1 and 2, and the embedded model: a UNet that attends to the states of one CLIP.

    denoiser(latents, t, encoder_hidden_states)       noise (epsilon) or velocity (v_prediction)

Single files name their UNet's blocks `input_blocks`; the width of the text it attends to tells the generation: 768 SD
1.x, 1024 SD 2.x (2048 is SDXL). Input channels: 4, or 9 with a mask and the masked image (inpainting). Noise or
velocity is not in the tensors: marks and metadata of the file tell, and where they do not, the evidence names what was
assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import (
    IMAGE_PRESET,
    BlueprintView,
    ModelView,
    Network,
    Shape,
    Tensors,
    Variant,
)
from inweave.models.families.clip import CLIP_TOKENIZERS, ClipFamily
from inweave.models.families.declared import Prediction

if TYPE_CHECKING:
    from torch import Tensor, nn


_STABILITY = "stabilityai/stable-diffusion"
ABSENT = [None, None]  # how a pipeline's index marks a part that is left out
#: width of the text a UNet attends to -> (base, what people call it)
_TEXT_WIDTHS = {768: ("sd1.5", "SD 1.x"), 1024: ("sd2.1", "SD 2.x"), 2048: ("sdxl", "SDXL")}
_PREDICTIONS: dict[str, Prediction] = {
    "v": "v_prediction", "v_prediction": "v_prediction", "v-prediction": "v_prediction",
    "epsilon": "epsilon", "eps": "epsilon",
}  # fmt: skip
#: what the published names of architectures say about SD 2.x
_ARCHITECTURES: dict[str, Prediction] = {
    "stable-diffusion-v2-768-v": "v_prediction",
    "stable-diffusion-v2-512": "epsilon",
}


def _listed(network: nn.Module, name: str) -> list[nn.Module]:
    part: Any = getattr(network, name, None)
    return [] if part is None else list(part) if hasattr(part, "__iter__") else [part]


class UNetFamily(ClipFamily):
    """The common part of the families with a UNet."""

    table = "unet"
    single_file = "a UNet (input_blocks)"
    masked_inputs = True
    steps = 20
    guidance = 7.5
    attention = (r"to_[qkv]", r"to_out\.0")
    feed_forward = (r"ff\.net\.\d+(\.proj)?",)
    inpaint_variants: ClassVar[Mapping[str, str]]  # base -> the variant with nine input channels

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        """Return residual and transformer blocks, which take turns, and samplers; those of text encoders in a list."""

        parts = [part for name in ("down_blocks", "mid_block", "up_blocks") for part in _listed(network, name)]
        if not parts:
            return super().blocks(network)
        blocks: list[nn.Module] = []
        for part in parts:
            residual = list(getattr(part, "resnets", None) or ())
            attentions = list(getattr(part, "attentions", None) or ())
            for number, each in enumerate(residual):
                blocks.append(each)
                for attention in attentions[number : number + 1]:
                    blocks += getattr(attention, "transformer_blocks", [attention])
            blocks += [*(getattr(part, "downsamplers", None) or ()), *(getattr(part, "upsamplers", None) or ())]
        return blocks

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        width = next((shape[1] for name, shape in tensors.items() if name.endswith("attn2.to_k.weight")), 0)
        if width not in _TEXT_WIDTHS:
            known = ", ".join(f"{each} ({label})" for each, (_, label) in _TEXT_WIDTHS.items())
            raise FormatError(f"a UNet that attends to text of width {width}; known are {known}")
        base, _ = _TEXT_WIDTHS[width]
        if base not in self.inpaint_variants:
            return None
        sized = "label_emb.0.0.weight" in tensors
        if sized != self.sized:
            raise FormatError(
                f"a UNet of {base}'s text width {'with' if sized else 'without'} label_emb: no known model"
            )
        evidence = [f"UNet (input_blocks), text of width {width}: {base}"]
        channels = tensors.get("input_blocks.0.0.weight", (0, 0))[1]
        if channels == 9:
            return self.inpaint_variants[base], [*evidence, "9 input channels (image, mask, masked image): inpainting"]
        if channels != 4:
            raise FormatError(f"a UNet of {base} with {channels} input channels; expected 4, or 9 for inpainting")
        return base, evidence

    sized = False  # whether the UNet is conditioned on image sizes

    def refine(
        self, variant: Variant, tensors: Mapping[str, Shape], metadata: Mapping[str, str]
    ) -> tuple[Variant, list[str]]:
        variant, evidence = super().refine(variant, tensors, metadata)
        prediction, sign = self.prediction_sign(variant, tensors, metadata)
        if prediction is None:
            return variant, [*evidence, *([sign] if sign else [])]
        evidence.append(f"{sign}: {prediction}")
        if (other := self.predicting(variant, prediction)) is not None:
            return other, evidence
        zero = prediction == "v_prediction" and "ztsnr" in tensors
        if zero:
            evidence.append("the mark ztsnr: zero terminal SNR")
        return replace(variant, prediction=prediction, zero_terminal_snr=zero), evidence

    def prediction_sign(
        self, variant: Variant, tensors: Mapping[str, Shape], metadata: Mapping[str, str]
    ) -> tuple[Prediction | None, str]:
        """Return what the UNet predicts and the evidence in the file; None without evidence."""
        label = metadata.get("modelspec.prediction_type", "").strip().lower()
        if "v_pred" in tensors:
            return "v_prediction", "the mark v_pred"
        if label in _PREDICTIONS:
            return _PREDICTIONS[label], f"modelspec.prediction_type {label!r}"
        return None, ""

    def predicting(self, variant: Variant, prediction: Prediction) -> Variant | None:
        """Return the published variant with the same tensors and this prediction, or None."""
        return None

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        rest = dict(inputs)
        added = {name: rest.pop(name) for name in ("text_embeds", "time_ids") if name in rest}
        prediction: Tensor = model.denoiser(latents, t, added_cond_kwargs=added or None, return_dict=False, **rest)[0]
        return prediction


class StableDiffusion(UNetFamily):
    name = "sd"
    networks = (
        Network("unet", "UNet2DConditionModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "CLIPTextModel", "transformers"),
    )
    tokenizers = CLIP_TOKENIZERS
    trainable_encoders = ("text_encoder",)
    final_norm = True
    variants = (
        Variant("sd1.5", "sd", "runwayml/stable-diffusion-v1-5", 512, 20, 7.5),
        Variant("sd1.5-inpaint", "sd", "stable-diffusion-v1-5/stable-diffusion-inpainting", 512, 20, 7.5, inpaint=True),
        Variant("sd2.1", "sd", f"{_STABILITY}-2-1", 768, 20, 7.5, "v_prediction"),
        Variant("sd2.1-base", "sd", f"{_STABILITY}-2-1-base", 512, 20, 7.5, base="sd2.1",
                aliases=("sd21-base", "v2-1-base")),
        Variant("sd2-inpaint", "sd", f"{_STABILITY}-2-inpainting", 512, 20, 7.5, inpaint=True),
    )  # fmt: skip
    inpaint_variants: ClassVar[Mapping[str, str]] = {"sd1.5": "sd1.5-inpaint", "sd2.1": "sd2-inpaint"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "inweave/emoji": {
            # the learning rate is high for a short run, so it rises and falls
            "rank": 8, "learning_rate": 2e-3, "lr_scheduler": "cosine", "warmup": 20, "steps": 300, "batch_size": 2,
            "resolution": 128, "bucket_step": 32, "targets": "attention-mlp", "precision": "fp32",
            "caption_dropout": 0.1,
        },
        "sd": {**IMAGE_PRESET, "resolution": 512, "text_encoder_learning_rate": 5e-5},
        # published for 512 and for 768 pixels: the model's own resolution is used
        "sd2": {**IMAGE_PRESET, "text_encoder_learning_rate": 5e-5},
    }  # fmt: skip
    pipeline = "StableDiffusionPipeline"
    inpaint_pipeline = "StableDiffusionInpaintPipeline"
    index_options: ClassVar[Mapping[str, Any]] = {
        "feature_extractor": ABSENT, "image_encoder": ABSENT, "safety_checker": ABSENT,
        "requires_safety_checker": False,
    }  # fmt: skip

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "UNet2DConditionModel" and config.get("addition_embed_type") != "text_time"

    def preset_name(self, blueprint: BlueprintView) -> str:
        own = super().preset_name(blueprint)
        second = blueprint.denoiser_config.get("cross_attention_dim", 768) == 1024
        return "sd2" if own == self.name and second else own

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        name = variant.name if variant is not None else ""
        if name.startswith("inweave/"):
            return name, name.replace("/", "-")
        if name.startswith("sd2"):
            return "sd_v2", f"stable-diffusion-v2-{'768-v' if prediction == 'v_prediction' else '512'}"
        return "sd_v1", "stable-diffusion-v1"

    def prediction_sign(
        self, variant: Variant, tensors: Mapping[str, Shape], metadata: Mapping[str, str]
    ) -> tuple[Prediction | None, str]:
        prediction, sign = super().prediction_sign(variant, tensors, metadata)
        if prediction is not None or variant.name != "sd2.1":
            return prediction, sign
        architecture = metadata.get("modelspec.architecture", "").strip().lower()
        if architecture in _ARCHITECTURES:
            return _ARCHITECTURES[architecture], f"modelspec.architecture {architecture!r}"
        return None, (
            "SD 2.1 and 2.1-base have the same tensors and no metadata tells them apart: v_prediction is assumed; "
            "name sd2.1-base to override"
        )

    def predicting(self, variant: Variant, prediction: Prediction) -> Variant | None:
        return self.variant("sd2.1-base") if (variant.name, prediction) == ("sd2.1", "epsilon") else None

    def clip_layer(self, clip_skip: int | None) -> int | None:
        return None if clip_skip in (None, 1) else clip_skip

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        return {"encoder_hidden_states": self.clip_states(model, ids, clip_skip, weights)[0]}


SD = StableDiffusion()
