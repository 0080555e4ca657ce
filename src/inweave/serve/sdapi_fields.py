"""A1111's fields in our words; clients send numbers as 20 or 20.0, and null for what they leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inweave.errors import ConfigError
from inweave.models.samplers import SAMPLERS, SCHEDULES, sampler_name, schedule_name

_TAG = re.compile(r"<(?:lora|lyco):[^<>]*>")
#: fields that change a picture elsewhere and have no effect here -> their values that mean "off"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "subseed_strength": (0,), "seed_resize_from_h": (-1, 0), "seed_resize_from_w": (-1, 0), "restore_faces": (False,),
    "tiling": (False,), "enable_hr": (False,), "refiner_checkpoint": ("", "None"), "s_churn": (0,), "s_tmin": (0,),
    "s_noise": (1,), "s_min_uncond": (0,), "eta": (0,), "styles": ([],), "alwayson_scripts": ({},),
    "firstpass_image": ("",), "initial_noise_multiplier": (1,), "image_cfg_scale": (), "latent_mask": ("",),
}  # fmt: skip


def image_fields(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """A1111's fields in our words."""
    names = {"prompt": "prompt", "negative_prompt": "negative_prompt", "steps": "steps", "cfg_scale": "guidance",
             "width": "width", "height": "height", "clip_skip": "clip_skip", "on_mismatch": "on_mismatch",
             "loras": "loras"}  # fmt: skip
    fields = {ours: body[theirs] for theirs, ours in names.items() if theirs in body}
    for name in ("steps", "width", "height", "clip_skip"):  # clients send 20.0 for 20
        if isinstance(fields.get(name), float) and fields[name].is_integer():
            fields[name] = int(fields[name])
    if body.get("disable_extra_networks"):
        fields["prompt"] = _TAG.sub("", str(fields.get("prompt", "")))
    seed = body.get("seed", -1)
    fields["seed"] = int(seed) if isinstance(seed, float) and seed.is_integer() else seed
    batches = (whole_number(body, "batch_size") or 1) * (whole_number(body, "n_iter") or 1)
    fields["count"] = batches
    sampler = str(body.get("sampler_name") or body.get("sampler_index") or "")
    if sampler:
        known, schedule = sampler_name(sampler)
        if known in SAMPLERS:
            fields["sampler"] = known
            if schedule is not None:
                fields["schedule"] = schedule
        else:
            warnings.append(f"sampler {sampler[:60]!r} is unknown; the model's own was used")
    if scheduler := str(body.get("scheduler") or ""):
        if schedule_name(scheduler) in SCHEDULES:
            fields["schedule"] = schedule_name(scheduler)
        else:
            warnings.append(f"scheduler {scheduler[:60]!r} is unknown; the default was used")
    if script := body.get("script_name"):
        raise ConfigError(f"script_name: script {str(script)[:60]!r} not found; scripts are not supported")
    return fields


def unsupported_fields(body: Mapping[str, Any]) -> list[str]:
    """One line per field that has no effect here and is not off."""
    return [
        f"{name} has no effect here"
        for name, off in _UNSUPPORTED.items()
        if name in body and body[name] not in off and body[name] is not None
    ]


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    value = number(body, name)
    if value is None:
        return None
    if value != int(value) or not 0 <= value <= 100_000:
        raise ConfigError(f"{name}: expected a whole number, got {value:g}")
    return int(value)


def number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 2**62:
        raise ConfigError(f"{name}: expected a number")
    return float(value)


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    echo = dict(body)
    if not body.get("include_init_images"):
        echo |= {name: None for name in ("init_images", "mask") if name in echo}
    return echo
