"""Qwen-Image: image patches and text in two streams that attend to each other.

    hidden_states  (batch, rows * columns, channels * 4)     img_shapes  (1, rows, columns) of every image
    timestep       t / 1000

Prompts go through the language model of Qwen2.5-VL, inside a template that asks for a description of the image; the 34
tokens before the prompt are dropped. A blank stands for no prompt, as its makers advise.

Guidance scales each patch of the guided prediction to the length of the plain one:

    g = negative + guidance (positive - negative)        prediction = g |positive| / |g|

The autoencoder is Wan's, for video: its latents have a mean and a deviation per channel. Timesteps are shifted by the
size of the image. Qwen-Image-Edit has the same networks and another chat (`qwen_image_edit`). Single files have
diffusers' names, under `model.diffusion_model.` or without a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import IMAGE_PRESET, ModelView, Network, Shape, Variant
from inweave.models.families.chat import ChatFamily
from inweave.models.families.flux import pack, unpack
from inweave.models.families.references import pop_references

if TYPE_CHECKING:
    from torch import Tensor, nn


#: an empty tensor in single files of Qwen-Image-Edit-2511, whose references are modulated as at time 0
MARK_2511 = "__index_timestep_zero__"


class QwenImage(ChatFamily):
    name = "qwen-image"
    networks = (
        Network("transformer", "QwenImageTransformer2DModel"),
        Network("vae", "AutoencoderKLQwenImage"),
        Network("text_encoder", "Qwen2_5_VLForConditionalGeneration", "transformers", text_model="Qwen2_5_VLTextModel"),
    )
    variants: ClassVar[tuple[Variant, ...]] = (
        Variant("qwen-image", "qwen-image", "Qwen/Qwen-Image", 1328, 50, 4.0, "flow"),
    )
    table = "own"
    single_file = "Qwen-Image (txt_mlp)"
    flow = True
    even_sigmas = True
    latent_patch = 2
    steps = 50
    guidance = 4.0
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen-image": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "shift"}
    }
    timesteps = "shift"
    attention = (r"to_[qkv]", r"to_out\.0", r"add_[qkv]_proj", r"to_add_out")
    feed_forward = (r"(img|txt)_mlp\.net\.\d+(\.proj)?",)
    relatives: ClassVar[Mapping[str, str]] = {
        "edit": "Qwen-Image-Edit, which has the networks of Qwen-Image and sees the image to be edited; from a prompt "
        "alone it would make wrong images. The versions 2509 and 2511 can be run: --variant qwen-image-edit-2509",
    }
    pipeline = "QwenImagePipeline"
    template = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    dropped = 34
    limit = 1024
    empty_text = " "

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return self.is_known(class_name, config) and not config.get("zero_cond_t")

    def is_known(self, class_name: str, config: Mapping[str, Any]) -> bool:
        """Return whether the denoiser is that of Qwen-Image, or of a version that edits."""
        layered = config.get("use_additional_t_cond") or config.get("use_layer3d_rope")
        return class_name == "QwenImageTransformer2DModel" and not layered

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        depth = len({name.split(".", 2)[1] for name in tensors if ".txt_mlp." in name})
        if not depth or "txt_norm.weight" not in tensors or MARK_2511 in tensors:
            return None
        if any(name.startswith("time_text_embed.addition_t_embedding.") for name in tensors):
            raise FormatError(
                "Qwen-Image with addition_t_embedding is Qwen-Image-Layered; only Qwen-Image is supported"
            )
        return "qwen-image", [f"{depth} transformer_blocks with txt_mlp: qwen-image"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "qwen_image", "qwen-image"

    def complete(self, folder: str, network: nn.Module) -> None:
        """Positions are tensors that are neither parameters nor buffers: computed anew, with numbers."""
        if folder == "transformer":
            positions: Any = network.pos_embed
            network.pos_embed = type(positions)(positions.theta, positions.axes_dim, positions.scale_rope)

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        import torch

        others, batch = dict(inputs), len(latents)
        images = [latents, *pop_references(others)]
        shapes = [(1, each.shape[2] // 2, each.shape[3] // 2) for each in images]
        prediction = model.denoiser(
            hidden_states=torch.cat([pack(each) for each in images], 1), img_shapes=[shapes] * batch,
            timestep=t.expand(batch).to(latents.dtype) / 1000, return_dict=False, **others,
        )[0]  # fmt: skip
        return unpack(prediction[:, : shapes[0][1] * shapes[0][2]], latents.shape)

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        plain, guided = pack(positive), pack(super().guide(negative, positive, guidance))
        return unpack(guided * (plain.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)), positive.shape)


QWEN_IMAGE = QwenImage()
