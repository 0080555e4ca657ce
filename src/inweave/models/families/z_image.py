"""Z-Image and Z-Image Turbo: one stream of image patches and text, after two short refiners of each.

    x       list of (channels, 1, height, width)         cap_feats  list of (length, width), as long as each text is
    t       1 - t / 1000: 0 is noise, 1 is the image     the prediction is image minus noise, so its sign is turned

The denoiser pads every text to 32 tokens with a vector of its own and places the image after it, so a row depends on
the true length of its own text alone.

Prompts go through Qwen3-4B, of which the states of the layer before the last are used. Guidance is counted as in
diffusers: positive + g (positive - negative), so that 0 is none and g is one less than the usual CFG scale. Turbo
needs none.

Single files name their attention `attention.qkv` in `layers`, `noise_refiner` and `context_refiner`. Turbo and the
model it was distilled from have the same tensors: an adapter fits both. Trained on Turbo it slowly undoes the
distillation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.models.families.base import IMAGE_PRESET, ModelView, Network, Shape, Variant
from inweave.models.families.chat import ChatFamily

if TYPE_CHECKING:
    from torch import Tensor


class ZImage(ChatFamily):
    name = "z-image"
    networks = (
        Network("transformer", "ZImageTransformer2DModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "Qwen3Model", "transformers"),
        Network("text_encoder", "Qwen3ForCausalLM", "transformers", text_model="Qwen3Model"),
    )
    variants = (
        Variant("z-image-turbo", "z-image", "Tongyi-MAI/Z-Image-Turbo", 1024, 8, 0.0, "flow"),
        Variant("z-image", "z-image", "Tongyi-MAI/Z-Image", 1024, 50, 4.0, "flow", base="z-image-turbo", mark="base",
                aliases=("z-image-base", "zimage", "zimage-base")),
    )  # fmt: skip
    table = "z-image"
    single_file = "Z-Image (noise_refiner)"
    flow = True
    even_sigmas = True
    latent_patch = 2
    steps = 8
    guidance = 0.0
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "z-image": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "shift", "timestep_shift": 2.0}
    }
    timesteps = "shift"
    attention = (r"to_[qkv]", r"to_out\.0")
    feed_forward = (r"feed_forward\.w[123]",)
    pipeline = "ZImagePipeline"
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    layer = 2
    limit = 512

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "ZImageTransformer2DModel" and config.get("siglip_feat_dim") is None

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        depth = len({name.split(".", 2)[1] for name in tensors if name.startswith("layers.")})
        return "z-image-turbo", [f"noise_refiner, context_refiner and {depth} layers: Z-Image"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "z_image", "z-image"

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch

        states, mask = inputs["encoder_hidden_states"], inputs.get("encoder_hidden_states_mask")
        lengths = [states.shape[1]] * len(states) if mask is None else mask.sum(1).tolist()
        texts = [row[:length] for row, length in zip(states, lengths, strict=True)]
        time = (1000 - t.expand(len(latents))) / 1000
        prediction = model.denoiser(list(latents[:, :, None].unbind()), time, texts, return_dict=False)[0]
        return -torch.stack(prediction)[:, :, 0]

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        return guidance > 0.0

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        return positive + guidance * (positive - negative)


Z_IMAGE = ZImage()
