"""What training asks of a model: its schedule, token numbers, and what the denoiser is told, with gradients if wanted.

trained_alphas   the schedule of noise the model was trained on, pure noise at its end where it was
token_inputs     text -> token numbers, CLIP's in a fixed number of chunks, so that rows of a batch are alike
encoded          token numbers -> what the family conditions on; the CLIPs may be learning
batched          that, with what depends on the picture's size: SDXL's sizes and crops, Flux's places and guidance

T5 never learns: it is larger than most denoisers, and what it says of a text can be kept instead (`t5_states`). Wherever
its token numbers are wanted, its answer may stand.
"""

from __future__ import annotations

from typing import Any

import torch

from inweave.models.encode import clip_tokens, run_clip
from inweave.models.families import T5_LENGTH, flux_places
from inweave.models.model import Model

Tensors = dict[str, torch.Tensor]
CLIPS = {"sd": ("text_encoder",), "sdxl": ("text_encoder", "text_encoder_2"),
         "sd3": ("text_encoder", "text_encoder_2"), "flux": ("text_encoder",)}  # fmt: skip
T5 = {"sd3": "text_encoder_3", "flux": "text_encoder_2"}


def trained_alphas(model: Model) -> torch.Tensor:
    """How much of the picture is left at each step. Samplers bend the last one; DDPM's are those of training."""
    from diffusers import DDPMScheduler

    found: torch.Tensor = DDPMScheduler.from_config(dict(model.scheduler.config)).alphas_cumprod  # type: ignore[no-untyped-call]
    return found


def chunks_needed(model: Model, texts: list[str]) -> int:
    """How many of CLIP's chunks the longest text takes."""
    tokenizers = [model.tokenizers[_tokenizer(folder)] for folder in CLIPS[model.family]]
    return max((len(clip_tokens(each, ((text, 1.0),)).ids) for each in tokenizers for text in texts if text), default=1)


def token_inputs(model: Model, text: str, chunks: int = 1) -> Tensors:
    """(1, chunks, length) of every CLIP, (1, length) of T5."""
    pieces = ((text, 1.0),) if text else ()
    found = {
        folder: clip_tokens(model.tokenizers[_tokenizer(folder)], pieces, chunks).ids[None, :chunks]
        for folder in CLIPS[model.family]
    }
    folder = T5.get(model.family, "")
    if folder in model.networks:
        found[folder] = model.tokenizers[_tokenizer(folder)](
            text, padding="max_length", truncation=True, max_length=t5_room(model), return_tensors="pt"
        ).input_ids
    return found


@torch.no_grad()
def text_inputs(model: Model, tokens: Tensors, clip_skip: int | None) -> Tensors:
    """What the denoiser is told of one text, by token numbers from anywhere."""
    return encoded(model, {name: ids.to(_device(model.networks[name])) for name, ids in tokens.items()}, clip_skip)


@torch.no_grad()
def t5_states(model: Model, tokens: Tensors) -> Tensors:
    """What T5 answers to one text, under its own name; nothing where the model has none."""
    folder = T5.get(model.family, "")
    if folder not in tokens:
        return {}
    network: Any = model.networks[folder]
    return {folder: network(tokens[folder].to(_device(network)))[0]}


def encoded(model: Model, tokens: Tensors, clip_skip: int | None) -> Tensors:
    """The conditioning of a batch of token numbers."""
    plain = model.family == "sd" and clip_skip in (None, 1)
    layer = None if plain or model.family == "flux" else max(clip_skip or 2, 2)
    clips = [_clip(model, tokens[f], f, layer) for f in CLIPS[model.family]]
    hidden = torch.cat([each for each, _ in clips], -1)
    pooled = [each for _, each in clips if each is not None]
    if model.family == "sd":
        return {"encoder_hidden_states": hidden}
    if model.family == "sdxl":
        return {"encoder_hidden_states": hidden, "text_embeds": pooled[-1]}
    if model.family == "flux":
        t5 = _t5(model, tokens)
        return {"encoder_hidden_states": t5, "pooled_projections": pooled[0].to(t5.dtype)}
    width = model.denoiser.config.joint_attention_dim
    hidden = torch.nn.functional.pad(hidden, (0, width - hidden.shape[-1]))
    if T5["sd3"] in tokens:
        t5 = _t5(model, tokens).to(hidden.dtype)
    else:
        t5 = hidden.new_zeros(len(hidden), T5_LENGTH["sd3"], width)
    return {"encoder_hidden_states": torch.cat([hidden, t5], 1), "pooled_projections": torch.cat(pooled, -1)}


def batched(model: Model, text: Tensors, sizes: torch.Tensor, shape: tuple[int, ...], guidance: float) -> Tensors:
    """All the denoiser is told; ``sizes`` are (height, width, top, left, height, width), ``shape`` the latents'."""
    told = {name: value.to(model.dtype) for name, value in text.items()}
    hidden = told["encoder_hidden_states"]
    if model.family == "sdxl":
        told["time_ids"] = sizes  # in float32: bfloat16 knows no number between 1024 and 1032
    if model.family == "flux":
        scale = model.latent_scale
        told["txt_ids"] = hidden.new_zeros(hidden.shape[1], 3)
        told["img_ids"] = flux_places(shape[2] * scale, shape[3] * scale, scale, hidden)
        if model.denoiser.config.guidance_embeds:
            told["guidance"] = torch.full((len(hidden),), guidance, dtype=torch.float32, device=hidden.device)
    return told


def t5_room(model: Model) -> int:
    """How many tokens T5 reads for this model."""
    if model.family == "sd3":
        return T5_LENGTH["sd3"]
    return T5_LENGTH["flux" if model.denoiser.config.guidance_embeds else "flux1-schnell"]


def _t5(model: Model, tokens: Tensors) -> torch.Tensor:
    given = tokens[T5[model.family]]
    return given if given.is_floating_point() else model.networks[T5[model.family]](given)[0]


def _clip(model: Model, ids: torch.Tensor, folder: str, layer: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, chunks, length = ids.shape
    encoder: Any = model.networks[folder]
    hidden, pooled = run_clip(encoder, ids.reshape(-1, length), layer=layer, normalise=model.family == "sd")
    first = None if pooled is None else pooled.reshape(batch, chunks, -1)[:, 0]
    return hidden.reshape(batch, chunks * length, -1), first


def _device(network: Any) -> torch.device:
    found: torch.device = network.device
    return found


def _tokenizer(encoder: str) -> str:
    return encoder.replace("text_encoder", "tokenizer")
