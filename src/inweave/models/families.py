"""How each family is asked: what it needs to know of a prompt, and one prediction of its denoiser.

    Conditioning = encode(model, pieces)             tensors of one prompt
    prediction   = predict(model, latents, t, ...)   of the same shape as the latents

Latents are (1, channels, height/8, width/8) for every family; Flux folds and unfolds its 2x2 patches here, so the loop
that denoises is the same for all.

Guidance: u + g (c - u) from one batch of two for SD 1, 2, XL and 3; Flux was distilled to take g as an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inweave.models.encode import Pieces, clip_tokens, encode_clip, encode_t5, t5_length
from inweave.models.model import Model

T5_LENGTH = {"sd3": 256, "flux1-schnell": 256, "flux": 512}


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the denoiser is told: keyword arguments for prompt and, where guidance is used, for its opposite."""

    inputs: Mapping[str, torch.Tensor]
    guidance: float
    guided: bool  # whether inputs hold two rows: the opposite first
    warnings: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for conditioning: both texts, how strongly to guide, and the size of the picture."""

    positive: Pieces
    negative: Pieces
    guidance: float
    width: int
    height: int
    clip_skip: int | None = None


def condition(model: Model, ask: Ask) -> Conditioning:
    """Encode both prompts the way the model's family wants them."""
    return {"sd": _sd, "sdxl": _sdxl, "sd3": _sd3, "flux": _flux}[model.family](model, ask)


def predict(model: Model, latents: torch.Tensor, t: torch.Tensor, told: Conditioning) -> torch.Tensor:
    """One prediction, guided where the conditioning says so."""
    if model.family == "flux":
        return _predict_flux(model, latents, t, told)
    rows = torch.cat([latents, latents]) if told.guided else latents
    found: torch.Tensor
    if model.family == "sd3":
        found = model.denoiser(hidden_states=rows, timestep=t.expand(rows.shape[0]), return_dict=False, **told.inputs)[
            0
        ]
    else:
        inputs = dict(told.inputs)
        added = {name: inputs.pop(name) for name in ("text_embeds", "time_ids") if name in inputs}
        found = model.denoiser(rows, t, added_cond_kwargs=added or None, return_dict=False, **inputs)[0]
    if not told.guided:
        return found
    opposite, wanted = found.chunk(2)
    return opposite + told.guidance * (wanted - opposite)


def _both(opposite: torch.Tensor, wanted: torch.Tensor, guided: bool) -> torch.Tensor:
    return torch.cat([opposite, wanted]) if guided else wanted


def _sd(model: Model, ask: Ask) -> Conditioning:
    guided = ask.guidance > 1.0
    encoder, tokenizer = model.networks["text_encoder"], model.tokenizers["tokenizer"]
    layer = None if ask.clip_skip in (None, 1) else ask.clip_skip
    wanted, opposite = _clip_pair(encoder, tokenizer, ask, layer=layer, normalise=True, guided=guided)
    hidden = _both(opposite[0], wanted[0], guided) if guided else wanted[0]
    return Conditioning({"encoder_hidden_states": hidden}, ask.guidance, guided)


def _sdxl(model: Model, ask: Ask) -> Conditioning:
    guided = ask.guidance > 1.0
    layer = max(ask.clip_skip or 2, 2)  # trained on the layer before the last
    pairs = [
        _clip_pair(model.networks[e], model.tokenizers[t], ask, layer=layer, normalise=False, guided=guided)
        for e, t in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"))
    ]
    wanted = torch.cat([pair[0][0] for pair in pairs], -1)
    pooled = pairs[1][0][1]
    hidden = wanted
    if guided:
        opposite = torch.cat([pair[1][0] for pair in pairs], -1)
        opposite_pooled = pairs[1][1][1]
        if not ask.negative and model.blueprint.settings.get("force_zeros_for_empty_prompt", True):
            opposite, opposite_pooled = torch.zeros_like(wanted), torch.zeros_like(pooled)
        hidden, pooled = torch.cat([opposite, wanted]), torch.cat([opposite_pooled, pooled])
    size = (ask.height, ask.width)
    ids = torch.tensor([[*size, 0, 0, *size]], dtype=hidden.dtype, device=hidden.device).repeat(hidden.shape[0], 1)
    return Conditioning({"encoder_hidden_states": hidden, "text_embeds": pooled, "time_ids": ids}, ask.guidance, guided)


def _clip_pair(
    encoder: Any, tokenizer: Any, ask: Ask, *, layer: int | None, normalise: bool, guided: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """(hidden, pooled) of the prompt and of its opposite, with as many chunks each; the second is the first unguided."""
    wanted = clip_tokens(tokenizer, ask.positive)
    if not guided:
        found = encode_clip(encoder, wanted, layer=layer, normalise=normalise)
        pair = (found.hidden, found.pooled)
        return pair, pair  # type: ignore[return-value]
    opposite = clip_tokens(tokenizer, ask.negative, len(wanted.ids))
    wanted = clip_tokens(tokenizer, ask.positive, len(opposite.ids))
    both = [encode_clip(encoder, tokens, layer=layer, normalise=normalise) for tokens in (wanted, opposite)]
    return (both[0].hidden, both[0].pooled), (both[1].hidden, both[1].pooled)  # type: ignore[return-value]


def _sd3(model: Model, ask: Ask) -> Conditioning:
    guided = ask.guidance > 1.0
    layer = max(ask.clip_skip or 2, 2)
    pairs = [
        _clip_pair(model.networks[e], model.tokenizers[t], ask, layer=layer, normalise=False, guided=guided)
        for e, t in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"))
    ]
    width = model.denoiser.config.joint_attention_dim
    texts = (ask.positive, ask.negative) if guided else (ask.positive,)
    warnings: list[str] = []
    hiddens, pooleds = [], []
    for number, pieces in enumerate(texts):
        clip = torch.cat([pair[number][0] for pair in pairs], -1)
        clip = torch.nn.functional.pad(clip, (0, width - clip.shape[-1]))
        if "text_encoder_3" in model.networks:
            t5 = _t5(model, "text_encoder_3", "tokenizer_3", pieces, T5_LENGTH["sd3"], warnings)
        else:
            t5 = torch.zeros(1, T5_LENGTH["sd3"], width, dtype=clip.dtype, device=clip.device)
            if number == 0:
                warnings.append("no T5 text encoder: the prompt goes through CLIP only")
        hiddens.append(torch.cat([clip, t5.to(clip.dtype)], 1))
        pooleds.append(torch.cat([pair[number][1] for pair in pairs], -1))
    hidden = _both(hiddens[-1], hiddens[0], guided)
    pooled = _both(pooleds[-1], pooleds[0], guided)
    return Conditioning(
        {"encoder_hidden_states": hidden, "pooled_projections": pooled}, ask.guidance, guided, tuple(warnings)
    )


def _flux(model: Model, ask: Ask) -> Conditioning:
    warnings: list[str] = []
    if ask.negative:
        warnings.append("Flux is distilled for guidance and takes no negative prompt: it was not used")
    tokens = clip_tokens(model.tokenizers["tokenizer"], ask.positive)
    pooled = encode_clip(model.networks["text_encoder"], tokens, layer=None, normalise=False).pooled
    assert pooled is not None
    length = T5_LENGTH["flux" if model.denoiser.config.guidance_embeds else "flux1-schnell"]
    hidden = _t5(model, "text_encoder_2", "tokenizer_2", ask.positive, length, warnings)
    inputs = {"encoder_hidden_states": hidden, "pooled_projections": pooled.to(hidden.dtype)}
    if model.denoiser.config.guidance_embeds:
        inputs["guidance"] = torch.tensor([ask.guidance], dtype=torch.float32, device=hidden.device)
    elif ask.guidance > 0:
        warnings.append("this Flux (schnell) takes no guidance: it was not used")
    inputs["txt_ids"] = torch.zeros(length, 3, dtype=hidden.dtype, device=hidden.device)
    inputs["img_ids"] = flux_places(ask.height, ask.width, model.latent_scale, hidden)
    return Conditioning(inputs, ask.guidance, False, tuple(warnings))


def _t5(model: Model, encoder: str, tokenizer: str, pieces: Pieces, length: int, warnings: list[str]) -> torch.Tensor:
    needed = t5_length(model.tokenizers[tokenizer], pieces)
    if needed > length:
        warnings.append(
            f"the prompt has {needed} T5 tokens; the last {needed - length} were not read (T5 reads {length})"
        )
    return encode_t5(model.networks[encoder], model.tokenizers[tokenizer], pieces, length)


def flux_places(height: int, width: int, scale: int, like: torch.Tensor) -> torch.Tensor:
    """(0, row, column) of every 2x2 patch."""
    rows, columns = height // scale // 2, width // scale // 2
    places = torch.zeros(rows, columns, 3, device=like.device)  # made there: a step of training copies nothing
    places[..., 1] = torch.arange(rows, device=like.device)[:, None]
    places[..., 2] = torch.arange(columns, device=like.device)[None, :]
    return places.reshape(-1, 3).to(like.dtype)


def _predict_flux(model: Model, latents: torch.Tensor, t: torch.Tensor, told: Conditioning) -> torch.Tensor:
    batch, channels, height, width = latents.shape
    folded = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    folded = folded.reshape(batch, height // 2 * width // 2, channels * 4)
    step = t.expand(batch).to(latents.dtype) / 1000
    found = model.denoiser(hidden_states=folded, timestep=step, return_dict=False, **told.inputs)[0]
    found = found.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return torch.as_tensor(found.reshape(batch, channels, height, width))
