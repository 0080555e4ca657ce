r"""Ranks, alphas and learning rates by block of a UNet, as kohya's networks write them, as rules.

    block_dims = 2,2,4,...      SD: 25 numbers, 12 of the way down, 1 of the middle, 12 of the way up; SDXL: 23
    down_lr_weight = 1,1,0,...  SD: 12 numbers, mid_lr_weight 1, up_lr_weight 12; SDXL: 9, 3 and 9
                     cosine+.2  or a curve: sine, cosine, linear, reverse_linear, zeros, plus an offset

    index  0  the input             1 + 3 i + j  block i, layer j of the way down; its downsampler is j = 2
    SD     12 the middle            13 + 3 i + j  block i, layer j of the way up; its upsampler is j = 2
    SDXL   10, 11, 12 the middle's first residual block, attention and second residual block

A weight of zero, or up to block_lr_zero_threshold, leaves the block out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, number_or, parse_int, parse_number

NAMES = names(
    "block_dims block_alphas conv_block_dims conv_block_alphas down_lr_weight mid_lr_weight up_lr_weight "
    "block_lr_zero_threshold"
)
_CURVES = ("sine", "cosine", "linear", "reverse_linear", "zeros")


def block_rules(out: Translation, arguments: Mapping[str, Any], convolutions: bool) -> None:
    """Add one rule per block that the arguments set something for."""
    present = {name: value for name, value in arguments.items() if name in NAMES and not is_off(value)}
    if not present or present.keys() == {"block_lr_zero_threshold"}:
        return
    sdxl = out.family == "sdxl"
    count = 23 if sdxl else 25
    rank, alpha = parse_int(out.get("network_dim") or 4), number_or(out.get("network_alpha"), 1)
    dims = _numbers(present, "block_dims", count) or [float(rank)] * count
    alphas = _numbers(present, "block_alphas", count) or [alpha] * count
    conv_dims, conv_alphas = _numbers(present, "conv_block_dims", count), _numbers(present, "conv_block_alphas", count)
    weights = _learning_rates(present, sdxl)
    rate = parse_number(out.get("unet_lr") or out.get("learning_rate") or 2e-6)
    threshold = parse_number(present.get("block_lr_zero_threshold") or 0.0)
    rules: list[dict[str, Any]] = []
    for index, linear, wide in _blocks(sdxl, convolutions or bool(conv_dims)):
        weight = weights[index] if weights else 1.0
        if weight <= threshold and weights:
            rules += [{"pattern": pattern, "skip": True} for pattern in (linear, wide) if pattern]
            continue
        scaled: dict[str, Any] = {"learning_rate": rate * weight} if weight != 1 else {}
        sized = "block_dims" in present or "block_alphas" in present
        if linear:
            rules += _rule(linear, dims[index], alphas[index], scaled, sized)
        if wide:
            conv_rank = conv_dims[index] if conv_dims else 0.0
            conv_alpha = conv_alphas[index] if conv_alphas else alpha
            rules += _rule(wide, conv_rank, conv_alpha, scaled, bool(conv_dims))
    if rules:
        for name in present:
            out.mapping[f"network_args.{name}"] = "rules"
        out.add_rules(f"network_args.{next(iter(present))}", rules)


def _rule(pattern: str, rank: float, alpha: float, scaled: dict[str, Any], sized: bool) -> list[dict[str, Any]]:
    if sized and rank == 0:
        return [{"pattern": pattern, "skip": True}]
    values = ({"rank": int(rank), "alpha": alpha or float(rank)} if sized else {}) | scaled  # 0: the rank
    return [{"pattern": pattern, **values}] if values else []


def _numbers(arguments: Mapping[str, Any], name: str, count: int) -> list[float]:
    if name not in arguments:
        return []
    numbers = [parse_number(each) for each in str(arguments[name]).strip("[]() ").split(",") if each.strip()]
    if len(numbers) != count:
        raise ValueError(f"{name}: expected {count} numbers, got {len(numbers)}")
    return numbers


def _learning_rates(arguments: Mapping[str, Any], sdxl: bool) -> list[float]:
    """Return the weight of every block; empty if none is set."""
    if not any(name in arguments for name in ("down_lr_weight", "mid_lr_weight", "up_lr_weight")):
        return []
    side, middle = (9, 3) if sdxl else (12, 1)
    down = _weights(arguments, "down_lr_weight", side)
    mid = _weights(arguments, "mid_lr_weight", middle)
    up = _weights(arguments, "up_lr_weight", side)
    return [1.0, *down, *mid, *up, 1.0] if sdxl else [*down, *mid, *up]


def _weights(arguments: Mapping[str, Any], name: str, count: int) -> list[float]:
    text = str(arguments.get(name, "")).strip()
    if not text:
        return [1.0] * count
    curve, _, added = text.partition("+")
    if curve in _CURVES:
        base, last = parse_number(added) if added else 0.0, max(1, count - 1)
        shapes = {
            "sine": [math.sin(math.pi * (i / last) / 2) for i in range(count)],
            "cosine": [math.sin(math.pi * (i / last) / 2) for i in reversed(range(count))],
            "linear": [i / last for i in range(count)],
            "reverse_linear": [i / last for i in reversed(range(count))],
            "zeros": [0.0] * count,
        }
        return [value + base for value in shapes[curve]]
    numbers = [parse_number(each) for each in text.strip("[]() ").split(",") if each.strip()]
    if not numbers:
        raise ValueError(f"{name}: expected numbers or one of {', '.join(_CURVES)}, got {for_message(text)}")
    return (numbers + [1.0] * count)[:count]  # kohya fills up with 1, and ignores the rest


def _blocks(sdxl: bool, convolutions: bool) -> list[tuple[int, str, str]]:
    """Return (index, pattern of linear layers and 1x1 convolutions, of wider convolutions) of blocks with adapters."""
    levels = 3 if sdxl else 4
    attention_down = (1, 2) if sdxl else (0, 1, 2)
    attention_up = (0, 1) if sdxl else (1, 2, 3)
    blocks: list[tuple[int, str, str]] = []
    for i in range(levels):
        for j in range(2):
            kinds = ["attentions"] * (i in attention_down) + ["resnets"] * convolutions
            blocks.append((1 + 3 * i + j, *_patterns(f"down_blocks\\.{i}", kinds, j, "", convolutions)))
        if convolutions and i < levels - 1:
            blocks.append((3 + 3 * i, "", f"unet\\.down_blocks\\.{i}\\.downsamplers\\."))
    if sdxl:
        if convolutions:
            blocks.append((10, *_patterns("mid_block", ["resnets"], 0, "", True)))
        blocks.append((11, "unet\\.mid_block\\.attentions\\.", ""))
        if convolutions:
            blocks.append((12, *_patterns("mid_block", ["resnets"], 1, "", True)))
    else:
        linear = "(attentions\\.|resnets\\.\\d+\\.(time_emb_proj|conv_shortcut))" if convolutions else "attentions\\."
        wide = "unet\\.mid_block\\.resnets\\.\\d+\\.conv[12]" if convolutions else ""
        blocks.append((12, f"unet\\.mid_block\\.{linear}", wide))
    for i in range(levels):
        for j in range(3):
            kinds = ["attentions"] * (i in attention_up) + ["resnets"] * convolutions
            sampler = f"|unet\\.up_blocks\\.{i}\\.upsamplers\\." if j == 2 and i < levels - 1 else ""
            blocks.append((13 + 3 * i + j, *_patterns(f"up_blocks\\.{i}", kinds, j, sampler, convolutions)))
    return [block for block in blocks if block[1] or block[2]]


def _patterns(place: str, kinds: list[str], layer: int, sampler: str, convolutions: bool) -> tuple[str, str]:
    linear = []
    if "attentions" in kinds:
        linear.append(f"attentions\\.{layer}\\.")
    if "resnets" in kinds:
        linear.append(f"resnets\\.{layer}\\.(time_emb_proj|conv_shortcut)")
    wide = f"unet\\.{place}\\.resnets\\.{layer}\\.conv[12]{sampler}" if "resnets" in kinds and convolutions else ""
    return (f"unet\\.{place}\\.({'|'.join(linear)})" if linear else "", wide)
