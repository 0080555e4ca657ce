"""Settings as InvokeAI writes them into images: PNG text `invokeai_metadata`, one table.

Fields that are not understood are each named in a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.generate.infotext import not_reproduced, read_sampler
from inweave.generate.prompt_edits import literal
from inweave.generate.source import ImageSettings
from inweave.generate.wildcards import escaped

_FIELDS = {
    "positive_prompt": "prompt", "negative_prompt": "negative_prompt", "steps": "steps", "cfg_scale": "guidance",
    "seed": "seed", "width": "width", "height": "height",
}  # fmt: skip
_HISTORY = ("generation_mode", "app_version", "created_by", "rand_device", "metadata_version")


def from_invoke(table: Mapping[str, Any]) -> ImageSettings:
    """Return the settings of InvokeAI's table."""
    settings = ImageSettings({"prompt": ""})
    fields = {name: value for name, value in table.items() if value not in (None, "", [], {}, False, 0)}
    for theirs, ours in _FIELDS.items():
        if theirs in table and table[theirs] is not None:
            value = table[theirs]
            settings.config[ours] = (
                escaped(literal(value)) if theirs.endswith("prompt") and isinstance(value, str) else value
            )
        fields.pop(theirs, None)
    read_sampler(settings, fields.pop("scheduler", None), None)
    model = fields.pop("model", None)
    if isinstance(model, Mapping):
        settings.model = {"name": model.get("name") or model.get("model_name"), "hash": _digits(model.get("hash"))}
    skipped = fields.pop("clip_skip", 0)
    if isinstance(skipped, int) and skipped > 0:
        settings.config["clip_skip"] = skipped + 1
    loras = fields.pop("loras", [])
    for entry in loras if isinstance(loras, list) else [loras]:
        about = (entry.get("model") or entry.get("lora")) if isinstance(entry, Mapping) else None
        name = (about.get("name") or about.get("model_name")) if isinstance(about, Mapping) else None
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            settings.warnings.append(not_reproduced("loras", entry))
            continue
        settings.config.setdefault("loras", []).append({"name": name, "strength": entry.get("weight", 1.0)})
        if isinstance(about, Mapping) and isinstance(digits := _digits(about.get("hash")), str):
            settings.hashes[name] = digits
    if "strength" in fields and ("init_image" in fields or "img2img" in str(table.get("generation_mode"))):
        settings.config["strength"] = fields.pop("strength")
        fields.pop("init_image", None)
        settings.inputs = ("init",)
    settings.warnings += [not_reproduced(name, value) for name, value in fields.items() if name not in _HISTORY]
    return settings


def _digits(text: object) -> object:
    return text.rpartition(":")[2] if isinstance(text, str) else None
