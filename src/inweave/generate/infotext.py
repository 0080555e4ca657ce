"""The text that AUTOMATIC1111's web UI, Forge and most model sites write into images, and read.

    prompt with <lora:name:strength> tags
    Negative prompt: ...
    Steps: 20, Sampler: Euler, ..., Lora hashes: "name: 12 hex digits", Version: inweave 0.1.0

    fields = field ("," field)*        field = name ":" value        value = JSON (text, list, table) | anything but a comma

A value that holds a comma, a colon or a line break is quoted as JSON. Reading takes one pass over the text. Fields that
inweave cannot reproduce are each named in a warning: a field that nobody mentions would be a silent difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import RequestError
from inweave.generate.prompt import syntax_warnings
from inweave.generate.source import ImageSettings
from inweave.models.sampler_names import nearest_sampler, nearest_schedule, sampler_name, schedule_name
from inweave.models.samplers import SAMPLERS, SCHEDULES, TABLE
from inweave.version import __version__

#: our names of samplers and schedules, as front ends show them
SAMPLER_LABELS = {name: entry.label for name, entry in TABLE.items()}
SCHEDULE_LABELS = {
    "simple": "Automatic", "karras": "Karras", "exponential": "Exponential", "sgm_uniform": "SGM Uniform",
    "ddim_uniform": "Uniform", "beta": "Beta",
}  # fmt: skip
#: what "Automatic" means there for samplers where it is not the plain schedule
AUTOMATIC = {
    "dpm_solver_multistep": "karras", "dpmpp_sde": "karras", "dpmpp_2s": "karras", "dpm_2": "karras", "dpm_2_ancestral": "karras",
    "dpmpp_2m_sde": "exponential", "dpmpp_2m_sde_heun": "exponential", "dpmpp_3m_sde": "exponential",
}  # fmt: skip
MAX_FIELDS = 200_000  #: characters of the last line
_KINDS = {int: "a whole number", float: "a number", str: "text"}
_NUMBERS = (
    ("Steps", "steps", int),
    ("CFG scale", "guidance", float),
    ("Seed", "seed", int),
    ("Clip skip", "clip_skip", int),
)
#: fields of the image's history that change no pixel
_SILENT = ("Version", "Created Date", "User", "Civitai metadata")
_HINTS = {
    "VAE": "the model's own autoencoder is used; choose one with --part vae=FILE",
    "VAE hash": "the model's own autoencoder is used; choose one with --part vae=FILE",
    "TI hashes": "embeddings (textual inversion) are not loaded, and their names in the prompt are plain words",
    "ENSD": "seeds are used as they are",
    "RNG": "noise comes from torch's generator on the CPU",
}


def infotext(record: Mapping[str, Any]) -> str:
    """The text of an image of ours."""
    config = record["config"]
    loras = record["loras"]
    tags = [_tag(lora) for lora in loras if not lora["in_prompt"]]
    lines = [" ".join([config["prompt"], *tags]).strip()]
    if config["negative_prompt"]:
        lines.append(f"Negative prompt: {config['negative_prompt']}")
    fields: dict[str, object] = {
        "Steps": config["steps"],
        "Sampler": SAMPLER_LABELS[config["sampler"]],
        "Schedule type": _schedule_label(config["sampler"], config["schedule"]),
        "CFG scale": f"{config['guidance']:g}",
        "Seed": config["seed"],
        "Size": f"{config['width']}x{config['height']}",
    }
    if record["model"].get("autov1"):
        fields["Model hash"] = record["model"]["autov1"]
    fields["Model"] = record["model"]["name"]
    if config.get("clip_skip"):
        fields["Clip skip"] = config["clip_skip"]
    if record["inputs"]:
        fields["Denoising strength"] = f"{config['strength']:g}"
    if loras:
        fields["Lora hashes"] = ", ".join(f"{lora['name']}: {lora['autov3']}" for lora in loras)
    fields["Version"] = f"inweave {__version__}"
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items()))
    return "\n".join(lines)


def from_infotext(text: str) -> dict[str, Any]:
    """The settings of a text, as fields of `GenerateConfig`, which refuses a sampler that inweave does not have."""
    settings = parse_infotext(text)
    return settings.config | settings.unknown


def parse_infotext(text: str) -> ImageSettings:
    """The settings of a text, and a warning for each field that is not reproduced."""
    head, _, last = text.strip().rpartition("\n")
    if not re.match(r"\s*+Steps:\s*+\d", last):
        head, last = text.strip(), ""
    prompt, _, negative = head.partition("Negative prompt:")
    fields = parse_fields(last)
    settings = ImageSettings({"prompt": prompt.strip()})
    config, warnings = settings.config, settings.warnings
    if negative.strip():
        config["negative_prompt"] = negative.strip()
    for theirs, ours, kind in _NUMBERS:
        if theirs in fields:
            value = fields.pop(theirs)
            try:
                config[ours] = kind(value)
            except ValueError:
                raise RequestError(
                    f"parameters: {theirs} is {for_message(value)}, which is not {_KINDS[kind]}"
                ) from None
    if match := re.fullmatch(r"(\d{1,9})x(\d{1,9})", fields.get("Size", "")):
        config["width"], config["height"] = int(match[1]), int(match[2])
        del fields["Size"]
    sampler, schedule = fields.pop("Sampler", None), fields.pop("Schedule type", None)
    if sampler is not None and schedule == "Automatic":
        schedule = AUTOMATIC.get(sampler_name(sampler)[0], schedule)
    read_sampler(settings, sampler, schedule)
    settings.model = {"name": fields.pop("Model", None), "hash": fields.pop("Model hash", None)}
    _read_hashes(settings, fields)
    upscaled = any(name.startswith("Hires") for name in fields)
    if "Denoising strength" in fields and not upscaled:
        settings.inputs = ("init",)
        config["strength"] = _fraction(fields.pop("Denoising strength"), warnings)
        if config["strength"] is None:
            del config["strength"]
    for name, value in fields.items():
        if name not in _SILENT:
            hint = (
                "there is no second pass (hires fix)" if upscaled and name.startswith(("Hires", "Denoising")) else None
            )
            warnings.append(not_reproduced(name, value, hint or _HINTS.get(name)))
    for text in (prompt, negative):
        warnings += [line for line in syntax_warnings(text) if line not in warnings]
    return settings


def parse_fields(line: str) -> dict[str, str]:
    """The fields of the last line, in one pass."""
    if len(line) > MAX_FIELDS:
        raise RequestError(f"parameters: {len(line):,} characters of settings; at most {MAX_FIELDS:,} are accepted")
    fields: dict[str, str] = {}
    decoder, at = json.JSONDecoder(), 0
    while (colon := line.find(":", at)) >= 0:
        name = line[at:colon].strip(" ,\t")
        start = colon + 1
        while start < len(line) and line[start].isspace():
            start += 1
        value, end = None, start
        if line[start : start + 1] in ('"', "[", "{") and line[start : start + 1]:
            try:
                value, end = decoder.raw_decode(line, start)
            except (ValueError, RecursionError):
                value = None
        if value is None:
            end = line.find(",", start)
            end = len(line) if end < 0 else end
            value = line[start:end].strip()
        if 0 < len(name) <= 100:
            fields.setdefault(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        comma = line.find(",", end)
        if comma < 0:
            break
        at = comma + 1
    return fields


def read_sampler(settings: ImageSettings, sampler: object, schedule: object) -> None:
    """Sampler and schedule by any name in use; what inweave does not have is a warning, and the model's own is used."""
    if sampler is not None:
        known, own_schedule = sampler_name(str(sampler))
        if known in SAMPLERS and own_schedule in (None, *SCHEDULES):
            settings.config["sampler"] = str(sampler)
        elif known in SAMPLERS:
            settings.config["sampler"], schedule = known, schedule if schedule is not None else own_schedule
        else:
            settings.unknown["sampler"] = str(sampler)
            settings.warnings.append(
                not_reproduced(
                    "Sampler",
                    sampler,
                    f"the model's own sampler is used; {_choice(nearest_sampler(str(sampler)), 'sampler')}",
                )
            )
        schedule = schedule if schedule is not None or known in SAMPLERS else own_schedule
    if schedule is not None:
        if schedule_name(str(schedule)) in SCHEDULES:
            settings.config["schedule"] = str(schedule)
        else:
            settings.unknown["schedule"] = str(schedule)
            hint = _choice(nearest_schedule(str(schedule)), "schedule")
            settings.warnings.append(not_reproduced("Schedule type", schedule, hint))


def _choice(nearest: str | None, option: str) -> str:
    return f"choose one with --{option}" if nearest is None else f"the nearest is --{option} {nearest}"


def not_reproduced(name: str, value: object, hint: str | None = None) -> str:
    """The warning about one field."""
    return f"{name} ({for_message(value)}) is not reproduced" + (f": {hint}" if hint else "")


def _read_hashes(settings: ImageSettings, fields: dict[str, str]) -> None:
    """Hashes of LoRAs: `Lora hashes` is "name: digits, ...", `Hashes` a table with keys such as lora:name."""
    for entry in fields.pop("Lora hashes", "").split(","):
        name, colon, digits = entry.rpartition(":")
        if colon and name.strip():
            settings.hashes[name.strip()] = digits.strip()
    try:
        table = json.loads(fields.pop("Hashes", "{}"))
    except (ValueError, RecursionError):
        return
    for key, digits in table.items() if isinstance(table, dict) else ():
        kind, _, name = key.lower().partition(":")
        if not isinstance(digits, str):
            continue
        if kind in ("lora", "lyco") and name:
            settings.hashes.setdefault(key.partition(":")[2], digits)
        elif kind == "model":
            settings.model["hash"] = settings.model.get("hash") or digits
        elif kind == "vae" and "VAE" not in fields and "VAE hash" not in fields:
            fields["VAE hash"] = digits
        elif kind == "embed":
            fields[f"embedding {name}"] = digits


def _fraction(text: str, warnings: list[str]) -> float | None:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        warnings.append(not_reproduced("Denoising strength", text))
        return None
    return value


def _tag(lora: Mapping[str, Any]) -> str:
    te, unet = lora["te"], lora["unet"]
    return f"<lora:{lora['name']}:{te:g}>" if te == unet else f"<lora:{lora['name']}:{te:g}:{unet:g}>"


def _schedule_label(sampler: str, schedule: str) -> str:
    """What front ends understand as this schedule; "Normal" where "Automatic" would be another one to them."""
    return "Normal" if schedule == "simple" and sampler in AUTOMATIC else SCHEDULE_LABELS[schedule]


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ",:\n") else text
