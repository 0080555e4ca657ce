"""FLUX.1: a transformer over 2x2 patches of latents and T5's states, with CLIP's pooled output. dev, schnell, Kontext.

    hidden_states  (batch, rows * columns, channels * 4)     img_ids  (0, row, column) of every patch
    timestep       t / 1000                                  txt_ids  zeros

dev was distilled to take guidance as a number (`guidance_embeds`), schnell to need none: neither uses a negative
prompt. Training leaves that distillation alone with a guidance of 1. Its timesteps are shifted by the size of the
image.

Kontext is dev for editing, with the same tensors: the patches of one reference image follow those of the image, at
positions (1, row, column), and their predictions are dropped. A reference has one of the sizes it was trained with.

Single files name their blocks `double_blocks`; one with `guidance_in` is dev, without it schnell. Kontext is known by a
file's metadata or name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import IMAGE_PRESET, ConditioningRequest, ModelView, Network, Shape, Tensors, Variant
from inweave.models.families.clip import CLIP_TOKENIZERS, T5_TOKENIZERS, ClipFamily
from inweave.models.families.references import ReferenceFit, Size, of_area, pop_references

if TYPE_CHECKING:
    from torch import Tensor

REFERENCES = "references"  # the tokens of references, after those of the image
#: width and height of Kontext's references
KONTEXT_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip


class Flux1(ClipFamily):
    name = "flux"
    reads_clip_states = False
    networks = (
        Network("transformer", "FluxTransformer2DModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "CLIPTextModel", "transformers"),
        Network("text_encoder_2", "T5EncoderModel", "transformers"),
    )
    tokenizers = (*CLIP_TOKENIZERS, *T5_TOKENIZERS)
    trainable_encoders = ("text_encoder",)
    frozen_encoders = ("text_encoder_2",)
    variants = (
        Variant("flux1-dev", "flux", "black-forest-labs/FLUX.1-dev", 1024, 28, 3.5, "flow"),
        Variant("flux1-schnell", "flux", "black-forest-labs/FLUX.1-schnell", 1024, 4, 0.0, "flow",
                aliases=("schnell",)),
        Variant("flux1-kontext-dev", "flux", "black-forest-labs/FLUX.1-Kontext-dev", 1024, 28, 2.5, "flow",
                base="flux1-dev", mark="kontext", pipeline="FluxKontextPipeline", references=1,
                aliases=("kontext", "flux-kontext", "flux1-kontext", "flux1-dev-kontext")),
    )  # fmt: skip
    table = "flux"
    single_file = "FLUX (double_blocks)"
    flow = True
    even_sigmas = True
    latent_patch = 2
    steps = 28
    guidance = 3.5
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "flux": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "shift", "guidance": 1.0}
    }
    timesteps = "shift"
    compile_saving = 0.07  # FLUX.1 dev with 494 layers: 446 ms recorded, 373 compiled as well
    attention = (r"to_[qkv]", r"to_out\.0", r"add_[qkv]_proj", r"to_add_out")
    feed_forward = (r"ff(_context)?\.net\.\d+(\.proj)?", "proj_mlp", r"single_transformer_blocks\.\d+\.proj_out")
    pipeline = "FluxPipeline"

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "FluxTransformer2DModel"

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        if any(name.startswith("distilled_guidance_layer.") for name in tensors):
            return None  # Chroma
        width = tensors.get("img_in.weight", (0, 0))[1]
        if width != 64:
            raise FormatError(
                f"FLUX with an input of width {width}; expected 64 (FLUX.1 dev, schnell); 384 is FLUX.1 Fill, "
                "128 is FLUX.1 Canny or Depth"
            )
        guided = any(name.startswith("guidance_in.") for name in tensors)
        base = "flux1-dev" if guided else "flux1-schnell"
        return base, [f"double_blocks {'with' if guided else 'without'} guidance_in: {base}"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "flux1", "flux-1-dev"

    def clip_layer(self, clip_skip: int | None) -> int | None:
        return None  # only what CLIP pools is used

    def t5_length(self, model: ModelView) -> int:
        return 512 if model.denoiser.config.guidance_embeds else 256

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        _, pooled = self.clip_states(model, ids, clip_skip, weights)
        t5 = self.t5_states(model, ids, weights)
        assert t5 is not None, "FLUX.1 models have a T5"
        return {"encoder_hidden_states": t5, "pooled_projections": pooled[0].to(t5.dtype)}

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        warnings = []
        if request.negative:
            warnings.append("FLUX.1 does not use a negative prompt; it was ignored")
        if request.guidance > 0 and not model.denoiser.config.guidance_embeds:
            warnings.append("FLUX.1 schnell does not use guidance; the value was ignored")
        return warnings

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        return False  # distilled: guidance is an input

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        import torch

        inputs = super().batch_inputs(model, text, sizes, latents, guidance)
        references = pop_references(inputs)
        hidden = inputs["encoder_hidden_states"]
        inputs["txt_ids"] = hidden.new_zeros(hidden.shape[1], 3)
        shapes = [latents, *(each.shape for each in references)]
        places = [patch_positions(shape[2] // 2, shape[3] // 2, hidden) for shape in shapes]
        for number, positions in enumerate(places):
            positions[:, 0] = number
        inputs["img_ids"] = torch.cat(places)
        if references:
            inputs[REFERENCES] = torch.cat([pack(each) for each in references], 1)
        if model.denoiser.config.guidance_embeds:
            inputs["guidance"] = torch.full((len(hidden),), guidance, dtype=torch.float32, device=hidden.device)
        return inputs

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        step = t.expand(len(latents)).to(latents.dtype) / 1000
        packed, others = with_references(pack(latents), inputs)
        prediction = model.denoiser(hidden_states=packed, timestep=step, return_dict=False, **others)[0]
        return unpack(prediction[:, : latents.shape[2] * latents.shape[3] // 4], latents.shape)

    def reference_fit(self, model: ModelView, size: Size, area: int | None = None) -> ReferenceFit:
        across, down = (max(side // 16, 1) for side in size)
        ratio = across / down
        _, *sides = min((abs(ratio - width / height), width, height) for width, height in KONTEXT_SIZES)
        if area is not None and area != self.reference_area:
            sides = list(of_area((sides[0], sides[1]), area, 16))
        return ReferenceFit((sides[0], sides[1]), (sides[0], sides[1]))

    def reference_problem(self, size: Size) -> str:
        return f"it is {size[0]}x{size[1]}; a reference has sides of 16 pixels or more" if min(size) < 16 else ""


def with_references(packed: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens of latents followed by those of references, and the denoiser's other arguments."""
    import torch

    others = dict(inputs)
    references = others.pop(REFERENCES, None)
    return packed if references is None else torch.cat([packed, references], 1), others


def pack(latents: Tensor) -> Tensor:
    """Return 2x2 patches as rows: (batch, rows * columns, channels * 4)."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height // 2 * width // 2, channels * 4)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return rows of patches as latents of this shape."""
    batch, channels, height, width = shape
    patches = packed.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels, height, width)


def patch_positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return (0, row, column) of every patch, in the dtype of ``like``."""
    import torch

    positions = torch.zeros(rows, columns, 3, device=like.device)  # made there: a training step copies nothing
    positions[..., 1] = torch.arange(rows, device=like.device)[:, None]
    positions[..., 2] = torch.arange(columns, device=like.device)[None, :]
    return positions.reshape(-1, 3).to(like.dtype)


FLUX = Flux1()
