"""A1111's fields, translated to those of an image request; clients send numbers as 20 or 20.0.

Every field works, or has no effect on an image anywhere, or is one of these:

refused    it asks for another image than this worker can make: unknown samplers and schedulers, a refiner, variations,
           tiling, another prompt or checkpoint in the second pass, and scripts that are on, such as ControlNet, which
           this worker does not have (A1111 refuses scripts it lacks too)
named      the image is the one that was asked for, without a finishing touch: in `warnings`, and in `info` with its
           `infotexts`, which clients show

With on_mismatch = "warn" what would be refused is named instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, Problem
from inweave.models.sampler_names import sampler_name, sampler_refusal, schedule_name, schedule_refusal
from inweave.models.samplers import offered_samplers, offered_schedules, schedules_of
from inweave.serve.api.a1111.requests import Img2Img

_TAG = re.compile(r"<(?:lora|lyco):[^<>]*>")
#: fields that change images in A1111 and have no effect here -> their values that mean "off" or "as always"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "subseed_strength": (0, -1), "seed_resize_from_h": (-1, 0), "seed_resize_from_w": (-1, 0),
    "restore_faces": (False,), "tiling": (False,), "refiner_checkpoint": ("", "None"),
    "s_churn": (0,), "s_tmin": (0,), "s_tmax": (0,), "s_noise": (1,),
    "s_min_uncond": (0,), "eta": (0, 1), "firstpass_image": ("",),
    "initial_noise_multiplier": (1,), "image_cfg_scale": (0, 1, 1.5), "latent_mask": ("",), "mask_round": (True,),
    "save_images": (False,),
}  # fmt: skip
#: those of them without which the image would be another one
_REFUSED = (
    "subseed_strength", "seed_resize_from_h", "seed_resize_from_w", "tiling", "refiner_checkpoint", "firstpass_image",
    "latent_mask", "alwayson_scripts",
)  # fmt: skip
#: settings of the web UI that requests may override -> their values that match what this worker does
_OVERRIDES: dict[str, tuple[Any, ...] | None] = {
    "sd_model_checkpoint": None, "CLIP_stop_at_last_layers": None, "sd_vae": ("", "None", "Automatic"),
    "samples_format": ("png",), "live_previews_enable": (True,), "sd_checkpoint_hash": ("",),
}  # fmt: skip
#: fields that work, or that have no effect on an image anywhere; SillyTavern sends its own `url` and `auth`
_KNOWN = {*Img2Img.model_fields, "url", "auth"}
#: fields of an image request in problems -> A1111's
FIELD_NAMES = {
    "guidance": "cfg_scale", "count": "batch_size", "strength": "denoising_strength", "image": "init_images",
    "mask_image": "mask", "sampler": "sampler_name", "schedule": "scheduler", "feather": "mask_blur",
    "upscale.upscaler": "hr_upscaler", "upscale.scale": "hr_scale", "upscale": "enable_hr",
}  # fmt: skip


def image_fields(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return the fields of an image request."""
    names = {"prompt": "prompt", "negative_prompt": "negative_prompt", "steps": "steps", "cfg_scale": "guidance",
             "width": "width", "height": "height", "clip_skip": "clip_skip", "on_mismatch": "on_mismatch",
             "loras": "loras", "upscale": "upscale", "outpaint": "outpaint", "grid": "grid",
             "template": "template"}  # fmt: skip
    fields = {"prompt": ""} | {ours: body[theirs] for theirs, ours in names.items() if theirs in body}
    for name in ("steps", "width", "height", "clip_skip"):  # clients send 20.0 for 20
        if isinstance(fields.get(name), float) and fields[name].is_integer():
            fields[name] = int(fields[name])
    if body.get("disable_extra_networks"):
        for name in ("prompt", "negative_prompt"):
            if isinstance(fields.get(name), str):
                fields[name] = _TAG.sub("", fields[name])
    seed = body.get("seed", -1)
    fields["seed"] = int(seed) if isinstance(seed, float) and seed.is_integer() else seed
    fields["count"] = (whole_number(body, "batch_size") or 1) * (whole_number(body, "n_iter") or 1)
    if switch(body, "do_not_save_samples", False):
        fields["gallery"] = False
    fields |= _sampler(body, warnings)
    if styles := body.get("styles"):
        if not isinstance(styles, list) or not all(isinstance(name, str) for name in styles):
            raise ConfigError(Problem("styles", "expected a list of names"))
        fields["styles"] = [name for name in styles if name and name != "None"]
    if script := body.get("script_name"):
        raise ConfigError(Problem("script_name", f"script {str(script)[:60]!r} not found; scripts are not supported"))
    return fields


def _sampler(body: Mapping[str, Any], warnings: list[str]) -> dict[str, str]:
    """Return sampler and schedule; raise ConfigError for unknown ones, or warn that the default replaces them."""
    label = label_of(body, "sampler_name") or label_of(body, "sampler_index")
    sampler, schedule = sampler_name(label)
    scheduler = label_of(body, "scheduler")
    problems = []
    if scheduler and schedule_name(scheduler) not in offered_schedules():
        problems.append(Problem("scheduler", schedule_refusal(scheduler)))
    elif scheduler:
        schedule = schedule_name(scheduler)
    if label and sampler not in offered_samplers():
        problems.append(Problem("sampler_name", sampler_refusal(label)))
    if problems and not _lenient(body):
        raise ConfigError(problems)
    warnings += [f"{problem}; the default was used" for problem in problems]
    if label and sampler not in offered_samplers():
        return {}  # the model's own, with its own schedule
    if not label and schedule in (None, "simple"):
        return {}
    sampler = sampler or "euler"  # A1111's own, where only a schedule was chosen
    if schedule is not None and schedule not in schedules_of(sampler):
        warnings.append(
            f"scheduler {for_message(scheduler or str(schedule))} does not work with {sampler}; the default was used"
        )
        schedule = "simple"
    return {"sampler": sampler} | ({} if schedule is None else {"schedule": schedule})


def label_of(body: Mapping[str, Any], name: str) -> str:
    """Return the value of a field that holds a name, "" if it is not there."""
    value = body.get(name) or ""
    if not isinstance(value, str):
        raise ConfigError(Problem(name, f"expected a name, got {for_message(value)}"))
    return value


def _lenient(body: Mapping[str, Any]) -> bool:
    return bool(body.get("on_mismatch") == "warn")


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise ConfigError for fields without which the image would be another one, unless the request is lenient."""
    lines = [] if _lenient(body) else ignored_fields({name: body[name] for name in _REFUSED if name in body})
    if lines:
        advice = 'turn it off, or send on_mismatch = "warn" to go without'
        raise ConfigError([Problem(line.split(":")[0].split()[0], f"{line}; {advice}") for line in lines])


def ignored_fields(body: Mapping[str, Any]) -> list[str]:
    """Return one line per field that has no effect here and is not off."""
    lines = [
        f"{name} has no effect here" for name, off in _UNSUPPORTED.items() if name in body and body[name] not in off
    ]
    if body.get("save_images"):
        lines[lines.index("save_images has no effect here")] += "; images stay in the gallery, if there is one"
    scripts = body.get("alwayson_scripts")
    if isinstance(scripts, Mapping):
        active = [name for name, script in scripts.items() if _is_on(script)]
        lines += [f"alwayson_scripts: script {str(name)[:60]!r} {_about_script(str(name))}" for name in active[:50]]
    elif scripts:
        lines.append("alwayson_scripts has no effect here")
    overrides = body.get("override_settings")
    if isinstance(overrides, Mapping):
        lines += [f"override_settings: {line}" for line in ignored_options(overrides)[:50]]
    elif overrides:
        raise ConfigError(Problem("override_settings", "expected an object"))
    if unknown := [name for name in body if name not in _KNOWN and name not in _UNSUPPORTED]:
        lines.append(f"unknown fields were ignored: {', '.join(str(name)[:60] for name in unknown[:20])}")
    return lines


def _about_script(name: str) -> str:
    return "is not supported by this worker" if "controlnet" in name.lower() else "has no effect here"


def _is_on(script: object) -> bool:
    """Return whether a script is on: it has arguments, and not just false."""
    arguments = script.get("args") if isinstance(script, Mapping) else script
    return bool(arguments) and arguments != [False]


def ignored_options(options: Mapping[str, Any]) -> list[str]:
    """Return one line per setting of the web UI that has no effect here."""
    lines = []
    for name, value in options.items():
        same = _OVERRIDES.get(name, ())
        if same is not None and value is not None and value not in same:
            lines.append(f"{str(name)[:60]} has no effect here")
    return lines


def clip_skip_option(options: Mapping[str, Any]) -> int | None:
    """Return `CLIP_stop_at_last_layers` of the web UI's settings."""
    value = whole_number(options, "CLIP_stop_at_last_layers")
    if value is not None and not 1 <= value <= 12:
        raise ConfigError(Problem("CLIP_stop_at_last_layers", f"expected 1 to 12, got {value}"))
    return value


def whole_number(body: Mapping[str, Any], name: str, most: int = 100_000) -> int | None:
    """Return the value of a field that holds a whole number, if it is there."""
    value = number(body, name)
    if value is None:
        return None
    if value != int(value) or not 0 <= value <= most:
        raise ConfigError(Problem(name, f"expected a whole number from 0 to {most:,}, got {value:g}"))
    return int(value)


def number(body: Mapping[str, Any], name: str) -> float | None:
    """Return the value of a field that holds a number, if it is there."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 2**62:
        raise ConfigError(Problem(name, "expected a number"))
    return float(value)


def switch(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the value of a field that clients send as true or as 1."""
    value = body.get(name, default)
    if value not in (0, 1):
        raise ConfigError(Problem(name, "expected true or false"))
    return bool(value)


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an answer repeats: without images, unless they are asked for."""
    echo = dict(body)
    if not body.get("include_init_images"):
        echo |= {name: None for name in ("init_images", "mask") if name in echo}
    return echo
