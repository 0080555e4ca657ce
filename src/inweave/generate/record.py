"""What made an image, written into it and read back.

    PNG text `inweave`         JSON: the complete configuration, the model, and every LoRA with hashes, strengths and the
                            modules it matched; `inweave generate --from` repeats it exactly
    PNG text `parameters`   the three parts other front ends read:
                                prompt with <lora:name:strength> tags
                                Negative prompt: ...
                                Steps: 20, Sampler: Euler, ..., Lora hashes: "name: 12 hex digits", Version: inweave 0.1.0

A value that holds a comma, a colon or a line break is quoted as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from inweave.errors import RequestError
from inweave.version import __version__

#: our names of samplers and schedules, as front ends show them
SAMPLER_LABELS = {
    "euler": "Euler", "euler_ancestral": "Euler a", "ddim": "DDIM", "ddpm": "DDPM", "dpm_solver_multistep": "DPM++ 2M",
    "uni_pc": "UniPC",
}  # fmt: skip
SCHEDULE_LABELS = {
    "simple": "Automatic", "karras": "Karras", "exponential": "Exponential", "sgm_uniform": "SGM Uniform",
    "ddim_uniform": "Uniform",
}  # fmt: skip
_KINDS = {int: "a whole number", float: "a number", str: "text"}
_PAIR = re.compile(r'\s*([\w /.-]+?):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')


def png_text(record: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    """Both texts, for `Image.save(pnginfo=...)`."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt("parameters", infotext(record))
    info.add_itxt("inweave", json.dumps(record, ensure_ascii=False, sort_keys=True))
    return info


def infotext(record: Mapping[str, Any]) -> str:
    """The text other front ends read and write."""
    config = record["config"]
    loras = record["loras"]
    tags = [_tag(lora) for lora in loras if not lora["in_prompt"]]
    lines = [" ".join([config["prompt"], *tags]).strip()]
    if config["negative_prompt"]:
        lines.append(f"Negative prompt: {config['negative_prompt']}")
    fields: dict[str, object] = {
        "Steps": config["steps"],
        "Sampler": SAMPLER_LABELS[config["sampler"]],
        "Schedule type": SCHEDULE_LABELS[config["schedule"]],
        "CFG scale": f"{config['guidance']:g}",
        "Seed": config["seed"],
        "Size": f"{config['width']}x{config['height']}",
        "Model": record["model"]["name"],
    }
    if config.get("clip_skip"):
        fields["Clip skip"] = config["clip_skip"]
    if record["inputs"]:
        fields["Denoising strength"] = f"{config['strength']:g}"
    if loras:
        fields["Lora hashes"] = ", ".join(f"{lora['name']}: {lora['autov3']}" for lora in loras)
    fields["Version"] = f"inweave {__version__}"
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items()))
    return "\n".join(lines)


def read_record(path: str | Path) -> dict[str, Any]:
    """The settings in an image: ours, or those of another front end as far as they have a meaning here."""
    try:
        with Image.open(path) as image:
            image.load()
            text = {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise RequestError(f"{path}: not an image that can be read: {error}") from None
    if "inweave" in text:
        try:
            record = json.loads(text["inweave"])
            config = dict(record["config"])
        except (ValueError, TypeError, KeyError):
            raise RequestError(f"{path}: its `inweave` text is damaged") from None
        return {"config": config, "model": record.get("model", {}), "loras": record.get("loras", [])}
    if "parameters" in text:
        return {"config": from_infotext(text["parameters"]), "model": {}, "loras": []}
    raise RequestError(f"{path}: no generation settings in this image (neither `inweave` nor `parameters`)")


def from_infotext(text: str) -> dict[str, Any]:
    """Settings out of the text of other front ends; what has no meaning here is ignored."""
    lines = text.strip().split("\n")
    last = lines.pop() if lines and re.match(r"\s*Steps:\s*\d+", lines[-1]) else ""
    body = "\n".join(lines)
    prompt, _, negative = body.partition("Negative prompt:")
    pairs = {name.strip(): _unquoted(value) for name, value in _PAIR.findall(last)}
    config: dict[str, Any] = {"prompt": prompt.strip()}
    if negative.strip():
        config["negative_prompt"] = negative.strip()
    for theirs, ours, kind in (
        ("Steps", "steps", int),
        ("CFG scale", "guidance", float),
        ("Seed", "seed", int),
        ("Clip skip", "clip_skip", int),
        ("Sampler", "sampler", str),
        ("Schedule type", "schedule", str),
    ):
        if theirs in pairs:
            try:
                config[ours] = kind(pairs[theirs])
            except ValueError:
                raise RequestError(f"parameters: {theirs} is {pairs[theirs]!r}, which is not {_KINDS[kind]}") from None
    if match := re.fullmatch(r"(\d+)x(\d+)", pairs.get("Size", "")):
        config["width"], config["height"] = int(match[1]), int(match[2])
    return config


def _tag(lora: Mapping[str, Any]) -> str:
    te, unet = lora["te"], lora["unet"]
    return f"<lora:{lora['name']}:{te:g}>" if te == unet else f"<lora:{lora['name']}:{te:g}:{unet:g}>"


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ",:\n") else text


def _unquoted(text: str) -> str:
    text = text.strip()
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text
