"""FLUX.2 dev and klein: a transformer over latents that are patches already, and the states of a language model.

    hidden_states  (batch, rows * columns, channels)         img_ids  (0, row, column, 0) of every latent
    timestep       t / 1000                                  txt_ids  (0, 0, 0, number) of every token

The text is a chat of exactly 512 tokens, the rest of them padding, which the denoiser reads like all else: so their
states are those that the language model has for them with its mask. States of three layers are joined, token by token:

    dev      Mistral Small, layers 10, 20, 30, after a system message       guidance is an input: dev was distilled
    klein    Qwen3 4B or 8B, layers 9, 18, 27, no thinking                  klein base is guided by a negative prompt,
                                                                            klein (4 steps) was distilled to need none

Noise levels are shifted by the size of the image and by the number of steps. Two lines were fitted for 10 and 200
steps; in between, and beyond, mu is a straight line in the number of steps:

    mu(tokens, 200) = 0.00016927 tokens + 0.45666666          mu(tokens, 10) = 8.73809524e-05 tokens + 1.89833333
    more than 4300 tokens: mu(tokens, 200) for any number of steps

The line of 200 steps is the one in the scheduler's configuration, and that of training.

Up to four reference images follow the image as further tokens, whose predictions are dropped; reference n = 1, 2, ...
is at (10 n, row, column, 0). Each keeps its size, its sides cut to multiples of 16, unless it has more than 1024 x 1024
pixels.

Single files have the tensors of `double_stream_modulation_img`; dev has `guidance_in`. klein and klein base have the
same tensors: an adapter fits both, and is better trained on klein base, which was not distilled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import (
    IMAGE_PRESET,
    BlueprintView,
    ConditioningRequest,
    ModelView,
    Network,
    Pieces,
    PromptTokens,
    Shape,
    Tensors,
    Variant,
    device_of,
)
from inweave.models.families.chat import ENCODER, MASK, QWEN_TOKENIZERS, ChatFamily
from inweave.models.families.flux import REFERENCES, with_references
from inweave.models.families.references import MOST_REFERENCES, ReferenceFit, Size, pop_references

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_APART = 10  # the first positions of an image and of its references, one after the other
_SHORTEST, _LONGEST = 64, 8  # pixels of a reference's side, and how often its short side goes into the long one
LENGTH = 512  # tokens of every text
_LONG = 4300  # tokens of an image from which on the number of steps does not matter
_FEW, _MANY = 10, 200  # steps of the two fitted lines, each with its slope and its start
_FEW_LINE, _MANY_LINE = (8.73809524e-05, 1.89833333), (0.00016927, 0.45666666)


class Flux2Family(ChatFamily):
    """What dev and klein share."""

    table = "flux2"
    single_file = "FLUX.2 (double_stream_modulation_img)"
    flow = True
    even_sigmas = True
    steps = 50
    guidance = 4.0
    timesteps = "shift"
    masks_padding = False
    limit = LENGTH
    references = MOST_REFERENCES
    layers: ClassVar[tuple[int, ...]]  # whose states are joined, counted from the embedding, which is 0
    attention = (
        r"to_[qkv]", r"to_out\.0", r"add_[qkv]_proj", r"to_add_out", "to_qkv_mlp_proj",
        r"single_transformer_blocks\.\d+\.attn\.to_out",
    )  # fmt: skip
    feed_forward = (r"ff(_context)?\.linear_(in|out)",)

    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        import torch

        tokenizer = model.tokenizers["tokenizer"]
        row, warnings = self.token_row(tokenizer, pieces, add_special_tokens=False)
        padding, mask = [tokenizer.pad_token_id] * (LENGTH - len(row)), [True] * len(row)
        if tokenizer.padding_side == "left":
            row, mask = padding + row, [False] * len(padding) + mask
        else:
            row, mask = row + padding, mask + [False] * len(padding)
        return PromptTokens({ENCODER: torch.tensor([row]), MASK: torch.tensor([mask])}, {}, 1, tuple(warnings))

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        states = ids[ENCODER]
        if not states.is_floating_point():
            states = self._joined_states(model, states, ids[MASK])
        return {"encoder_hidden_states": states}

    def frozen_states(self, model: ModelView, ids: Tensors) -> Tensors:
        device = device_of(model.networks[ENCODER])
        return {ENCODER: self._joined_states(model, ids[ENCODER].to(device), ids[MASK].to(device))}

    def pad_text(self, text: Tensors, chunks: int) -> Tensors:
        return text  # every text has all its tokens

    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        import torch

        width = len(self.layers) * model.networks[ENCODER].config.hidden_size
        return {ENCODER: torch.empty(1, LENGTH, width, dtype=model.dtype, device=device)}

    def _joined_states(self, model: ModelView, ids: Tensor, mask: Tensor) -> Tensor:
        import torch

        encoder: Any = model.networks[ENCODER]
        out = encoder(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer] for layer in self.layers], -1)

    def mu(self, tokens: int, steps: int) -> float | None:
        few, many = (slope * tokens + start for slope, start in (_FEW_LINE, _MANY_LINE))
        if tokens > _LONG:
            return many
        return many + (many - few) / (_MANY - _FEW) * (steps - _MANY)

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        import torch

        inputs = super().batch_inputs(model, text, sizes, latents, guidance)
        references = pop_references(inputs)
        hidden = inputs["encoder_hidden_states"]
        shapes = [latents, *(each.shape for each in references)]
        places = [_places(_APART * number, shape, hidden.device) for number, shape in enumerate(shapes)]
        words = torch.zeros(hidden.shape[1], 4, dtype=torch.long, device=hidden.device)
        words[:, 3] = torch.arange(hidden.shape[1], device=hidden.device)
        inputs |= {"img_ids": torch.cat(places), "txt_ids": words}
        if references:
            inputs[REFERENCES] = torch.cat([_packed(each) for each in references], 1)
        if model.denoiser.config.guidance_embeds:
            inputs["guidance"] = torch.full((len(hidden),), guidance, dtype=torch.float32, device=hidden.device)
        return inputs

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        step = t.expand(len(latents)).to(latents.dtype) / 1000
        packed, others = with_references(_packed(latents), inputs)
        prediction: Tensor = model.denoiser(hidden_states=packed, timestep=step, return_dict=False, **others)[0]
        return prediction[:, : latents.shape[2] * latents.shape[3]].transpose(1, 2).reshape(latents.shape)

    def reference_fit(self, model: ModelView, size: Size, area: int | None = None) -> ReferenceFit:
        (width, height), most = size, min(area or self.reference_area, self.reference_area)
        if width * height > most:
            scale = math.sqrt(most / (width * height))
            width, height = int(width * scale), int(height * scale)
        step = model.latent_space.scale
        return ReferenceFit((width, height), (max(width // step, 1) * step, max(height // step, 1) * step))

    def reference_problem(self, size: Size) -> str:
        if min(size) < _SHORTEST:
            return f"it is {size[0]}x{size[1]}; FLUX.2 reads references whose sides are {_SHORTEST} pixels or more"
        if max(size) > _LONGEST * min(size):
            return f"it is {size[0]}x{size[1]}; FLUX.2 reads references up to {_LONGEST} times as long as wide"
        return ""


class Flux2Dev(Flux2Family):
    name = "flux2"
    networks = (
        Network("transformer", "Flux2Transformer2DModel"),
        Network("vae", "AutoencoderKLFlux2"),
        Network("text_encoder", "Mistral3ForConditionalGeneration", "transformers", text_model="MistralModel"),
    )
    tokenizers = ("PixtralProcessor", "PreTrainedTokenizerFast", "TokenizersBackend")
    variants = (Variant("flux2-dev", "flux2", "black-forest-labs/FLUX.2-dev", 1024, 50, 4.0, "flow"),)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "flux2": {**IMAGE_PRESET, "rank": 32, "resolution": 1024, "timestep_sampling": "shift", "guidance": 1.0}
    }
    pipeline = "Flux2Pipeline"
    template = (
        "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing "
        "on object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
    )
    layers = (10, 20, 30)

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "Flux2Transformer2DModel" and bool(config.get("guidance_embeds", True))

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        if not _has_guidance(tensors):
            return None
        return "flux2-dev", ["double_stream_modulation_img with guidance_in: flux2-dev"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "flux2", "Flux.2-dev"

    def cleaned(self, text: str) -> str:
        return text.replace("[IMG]", "")  # the token of an image, and there is none

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        warnings = super().prompt_warnings(model, replace(request, negative=()))
        if request.negative:
            warnings.append("FLUX.2 dev does not use a negative prompt; it was ignored")
        return warnings

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        return False  # distilled: guidance is an input


class Flux2Klein(Flux2Family):
    name = "flux2-klein"
    networks = (
        Network("transformer", "Flux2Transformer2DModel"),
        Network("vae", "AutoencoderKLFlux2"),
        Network("text_encoder", "Qwen3Model", "transformers"),
        Network("text_encoder", "Qwen3ForCausalLM", "transformers", text_model="Qwen3Model"),
    )
    tokenizers = QWEN_TOKENIZERS
    variants = (
        Variant("flux2-klein-4b", "flux2-klein", "black-forest-labs/FLUX.2-klein-4B", 1024, 4, 0.0, "flow"),
        Variant("flux2-klein-base-4b", "flux2-klein", "black-forest-labs/FLUX.2-klein-base-4B", 1024, 50, 4.0, "flow",
                base="flux2-klein-4b", mark="base", aliases=("klein-base-4b",)),
        Variant("flux2-klein-9b", "flux2-klein", "black-forest-labs/FLUX.2-klein-9B", 1024, 4, 0.0, "flow"),
        Variant("flux2-klein-base-9b", "flux2-klein", "black-forest-labs/FLUX.2-klein-base-9B", 1024, 50, 4.0, "flow",
                base="flux2-klein-9b", mark="base", aliases=("klein-base-9b",)),
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "flux2-klein": {**IMAGE_PRESET, "rank": 32, "resolution": 1024, "timestep_sampling": "shift"}
    }
    pipeline = "Flux2KleinPipeline"
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    layers = (9, 18, 27)

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "Flux2Transformer2DModel" and not config.get("guidance_embeds", True)

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        if _has_guidance(tensors):
            return None
        width = tensors.get("img_in.weight", (0,))[0]
        sizes = {3072: "4b", 4096: "9b"}
        if width not in sizes:
            raise FormatError(
                f"FLUX.2 without guidance_in is klein, and this one is {width} wide; known are 3072 (4B) and 4096 (9B)"
            )
        base = f"flux2-klein-{sizes[width]}"
        return base, [f"double_stream_modulation_img without guidance_in, {width} wide: {base}"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        if variant is None:
            return "flux2_klein", "Flux.2-klein"
        size = variant.tensors.rpartition("-")[2]
        return f"flux2_klein_{size}", f"Flux.2-klein-{size}"

    def index_settings(self, variant: Variant) -> Mapping[str, Any]:
        return {**super().index_settings(variant), "is_distilled": variant.guidance == 0.0}

    def is_distilled(self, blueprint: BlueprintView) -> bool:
        """Return whether the model needs no guidance: as its folder says, or as published."""
        variant = blueprint.variant
        return bool(blueprint.settings.get("is_distilled", variant is not None and variant.guidance == 0.0))

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        return guidance > 1.0 and not self.is_distilled(model.blueprint)

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        warnings = super().prompt_warnings(model, request)
        if request.guidance > 1.0 and self.is_distilled(model.blueprint):
            warnings.append("FLUX.2 klein is distilled and does not use guidance; the value was ignored")
        return warnings


def _packed(latents: Tensor) -> Tensor:
    return latents.flatten(2).transpose(1, 2)


def _places(first: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (first, row, column, 0) of every latent; made on the device, so that nothing is copied."""
    import torch

    places = torch.zeros(shape[2], shape[3], 4, dtype=torch.long, device=device)
    places[..., 0] = first
    places[..., 1] = torch.arange(shape[2], device=device)[:, None]
    places[..., 2] = torch.arange(shape[3], device=device)[None, :]
    return places.reshape(-1, 4)


def _has_guidance(tensors: Mapping[str, Shape]) -> bool:
    return any(name.startswith("guidance_in.") for name in tensors)


FLUX2 = Flux2Dev()
FLUX2_KLEIN = Flux2Klein()
