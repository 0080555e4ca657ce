"""A model family in a package of its own: a small transformer over latents that attends to the states of one CLIP.

denoiser(latents, t / 1000, encoder_hidden_states)       noise minus image, as every flow predicts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.models.families.base import IMAGE_PRESET, ModelView, Network, Shape, Tensors, Variant
from inweave.models.families.clip import CLIP_TOKENIZERS, ClipFamily

if TYPE_CHECKING:
    import torch


class Mosaic(ClipFamily):
    """The whole of it: no line of inweave knows this family."""

    name = "mosaic"
    networks = (
        Network("transformer", "MosaicTransformer", "mosaic.networks"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "CLIPTextModel", "transformers"),
    )
    tokenizers = CLIP_TOKENIZERS
    trainable_encoders = ("text_encoder",)
    variants = (Variant("mosaic-tiny", "mosaic", "nobody/mosaic-tiny", 64, 4, 3.0, "flow", aliases=("mosaic1",)),)
    package = "mosaic"
    table = "own"
    single_file = "Mosaic (tiles)"
    listings: ClassVar[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
        "mosaic-tiny": {
            "tiles.weight": (16, 5),
            "tiles.bias": (16,),
            "proj_out.weight": (4, 16),
            "proj_out.bias": (4,),
            "blocks.[0-1].ff.up.weight": (32, 16),
            "blocks.[0-1].ff.up.bias": (32,),
            "blocks.[0-1].ff.down.weight": (16, 32),
            "blocks.[0-1].ff.down.bias": (16,),
        }
        | {f"blocks.[0-1].{name}.weight": (16, 16) for name in ("to_q", "to_k", "to_v", "to_out")}
        | {f"blocks.[0-1].{name}.bias": (16,) for name in ("to_q", "to_k", "to_v", "to_out")}
    }
    flow = True
    steps = 4
    guidance = 3.0
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mosaic": {**IMAGE_PRESET, "resolution": 64, "rank": 2}}
    attention = (r"to_[qkv]", "to_out")
    feed_forward = (r"ff\.(up|down)",)
    pipeline = "MosaicPipeline"

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "MosaicTransformer"

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        return ("mosaic-tiny", ["tiles: Mosaic"]) if "tiles.weight" in tensors else None

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "mosaic", "mosaic"

    def clip_layer(self, clip_skip: int | None) -> int | None:
        return clip_skip

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        return {"encoder_hidden_states": self.clip_states(model, ids, clip_skip, weights)[0]}

    def denoise(
        self, model: ModelView, latents: torch.Tensor, t: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        prediction: torch.Tensor = model.denoiser(latents, t.expand(len(latents)) / 1000, **inputs)
        return prediction


MOSAIC = Mosaic()
