"""Which model a file of kohya trains, and that it trains an adapter: everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.config.values import is_off, normalize_name, parse_pairs, parse_sizes
from inweave.training.importers.models import KNOWN, ensure_trainable, refuse_method, refuse_script
from inweave.training.importers.models import KOHYA as FAMILIES

_ADAPTER_KEYS = ("network_", "unet_lr", "lora_", "dim_from_weights", "rank", "lycoris_algo")
#: variants of Qwen-Image with another chat, or which make several images
_REFUSED = ("edit", "layered")
_SCRIPTS = (
    (r"textual_inversion|train_ti", "textual inversion trains an embedding"),
    (r"control_?net|lllite", "a ControlNet is trained"),
    (r"leco", "LECO trains without images"),
    (r"(^|[\\/])train_db\.py|train_dreambooth(?!\w*lora)", "DreamBooth trains the whole model"),
    (
        r"(^|[\\/])(fine_tune|\w*_train|train_text_to_image(?!\w*lora)\w*)\.py",
        "a full fine-tune trains the whole model",
    ),
)


def ensure_network_script(settings: Mapping[str, Any]) -> None:
    """Refuse a script that trains something other than an adapter."""
    script, name = str(settings.get("script") or ""), _script_name(settings)
    for pattern, method in _SCRIPTS:
        if script and re.search(pattern, script) and "network" not in name:
            raise refuse_method(name or script, method)
    if name and "train" not in name:
        raise refuse_script(name)


def _script_name(settings: Mapping[str, Any]) -> str:
    return re.sub(r"\.py$", "", str(settings.get("script") or "").replace("\\", "/").rpartition("/")[2])


def kohya_family(settings: Mapping[str, Any]) -> str:
    """Return the family, by the script, the network module or the parts of the model; refuse others."""
    name = _script_name(settings)
    kind = normalize_name(settings.get("model_train_type") or "")
    if kind and "lora" not in kind:
        raise refuse_method("model_train_type", f"{for_message(settings['model_train_type'])} trains no adapter")
    module = str(settings.get("network_module") or "")
    word = ""
    if match := re.fullmatch(r"(\w*?)_?train_network(_xl)?\w*", name):
        word = match[1] or ("sdxl" if match[2] else "sd")
        if normalize_name(word) not in FAMILIES:
            return ensure_trainable(None, word, "script")
    elif kind:
        word = kind.replace("lora", "")
    if match := re.match(r"networks\.(?:lora|loha|lokr|oft|dylora)_(\w+)", module):
        word = match[1] if match[1] != "fa" else word
    elif not word and (not is_off(settings.get("sdxl")) or _looks_like_sdxl(settings)):
        word = "sdxl"
    elif not word and settings.get("ae") and settings.get("t5xxl"):
        word = "flux"
    family = FAMILIES.get(normalize_name(word))
    if family == "flux" and normalize_name(settings.get("model_type")) == "chroma":
        return ensure_trainable(None, settings["model_type"], "model_type")
    return ensure_trainable(family, word, "network_module" if module and family is None else "script")


def _looks_like_sdxl(settings: Mapping[str, Any]) -> bool:
    """Return whether the model's name, its resolution or a setting of its script alone suggest SDXL."""
    name = str(settings.get("pretrained_model_name_or_path") or "").lower().replace("\\", "/").rpartition("/")[2]
    try:
        sides = parse_sizes(settings.get("resolution") or 512)
    except ValueError:
        sides = [512]
    large = max(sides) * min(sides) >= 1024 * 1024 and is_off(settings.get("v2"))
    cached = not is_off(settings.get("cache_text_encoder_outputs"))
    return large or cached or bool(re.search(r"xl|pony|illustrious|noob|animagine", name))


def ensure_adapter(settings: Mapping[str, Any]) -> None:
    """Refuse a file that trains the whole model, or an embedding."""
    if any(settings.get(name) for name in ("token_string", "init_word", "num_vectors_per_token")):
        raise refuse_method("token_string", "textual inversion trains an embedding")
    if any(name.startswith("leco_") for name in settings):
        raise refuse_method("leco_denoise_guidance_scale", "LECO trains from prompts, without images")
    if any(name.startswith(("cond_emb_dim", "lllite_")) for name in settings):
        raise refuse_method("cond_emb_dim", "a ControlNet is trained")
    module = str(settings.get("network_module") or "")
    if not is_off(settings.get("edit")) or normalize_name(settings.get("model_version")) in _REFUSED:
        version = for_message(settings.get("model_version") or "edit")
        why = f"is a variant of Qwen-Image that cannot be trained here; edit-2509, edit-2511, {KNOWN} can"
        raise ConfigError(f"model_version: {version} {why}")
    if "control_net" in module or "controlnet" in module:
        raise refuse_method("network_module", "a ControlNet is trained")
    if not any(name.startswith(_ADAPTER_KEYS) for name in settings):
        if (script := str(settings.get("script") or "")) and "train_network" not in script:
            raise refuse_script(script)
        raise refuse_method("network_module", "is not set: a full fine-tune or DreamBooth trains the whole model")
    algorithm = normalize_name(network_args(settings).get("algo", ""))
    if algorithm in ("full", "native"):
        raise refuse_method("network_args.algo", "full is a fine-tune of the whole model")


def network_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return network_args as a table; empty if they cannot be parsed, which is reported where they are read."""
    try:
        return parse_pairs(settings.get("network_args") or [])
    except ValueError:
        return {}
