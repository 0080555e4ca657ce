"""An import of kohya's settings: what its scripts would train, with everything written down.

    settings ──off and ignored ones removed──► + its defaults ──KOHYA's tables──► + times, objective, dataset, samples

The script decides the family: networks.lora on a UNet with or without `sdxl`, networks.lora_flux, networks.lora_sd3, or
the name of the script itself. Its scripts for transformers ignore what shapes the noise and the loss of a UNet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.importers.defaults import defaults
from inweave.training.importers.kohya.flow import MUSUBI, ensure_musubi_arguments, ignored_settings, read_times
from inweave.training.importers.kohya.network import is_lycoris
from inweave.training.importers.kohya.settings import KOHYA
from inweave.training.importers.models import (
    KNOWN,
    ensure_plain_base,
    ensure_trainable,
    refuse_method,
    refuse_script,
)
from inweave.training.importers.models import KOHYA as FAMILIES
from inweave.training.importers.optimizers import with_library_defaults
from inweave.training.importers.targets import FLOW
from inweave.training.importers.translate import Translation, refuse_hidden_dropout, translate
from inweave.training.importers.values import (
    is_off,
    normalize_name,
    parse_bool,
    parse_number,
    parse_pairs,
    parse_sizes,
)

_CACHED_TEXT = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
_SUBSET = ("keep_tokens_separator", "enable_wildcard", "caption_prefix", "caption_suffix", "alpha_mask")
_ADAPTER_KEYS = ("network_", "unet_lr", "lora_", "dim_from_weights", "rank", "lycoris_algo")
#: variants of Qwen-Image, which take images beside the prompt, or make several
_EDITING = ("edit", "editplus", "edit2509", "edit2511", "layered")
_SCRIPTS = (
    (r"textual_inversion|train_ti", "textual inversion trains an embedding"),
    (r"control_?net|lllite", "a ControlNet is trained"),
    (r"leco", "LECO trains without images"),
    (r"(^|[\\/])train_db\.py", "DreamBooth trains the whole model"),
    (r"train_dreambooth(?!\w*lora)", "DreamBooth trains the whole model"),
    (
        r"(^|[\\/])(fine_tune|\w*_train|train_text_to_image(?!\w*lora)\w*)\.py",
        "a full fine-tune trains the whole model",
    ),
)


def ensure_network_script(settings: Mapping[str, Any]) -> None:
    """Refuse a script that trains something other than an adapter."""
    script = str(settings.get("script") or "")
    name = re.sub(r"\.py$", "", script.replace("\\", "/").rpartition("/")[2])
    for pattern, method in _SCRIPTS:
        if script and re.search(pattern, script) and "network" not in name:
            raise refuse_method(name or script, method)


def kohya_family(settings: Mapping[str, Any], where: str = "") -> str:
    """The family that a script, a network module or the parts of a model tell."""
    script = str(settings.get("script") or "")
    name = re.sub(r"\.py$", "", script.replace("\\", "/").rpartition("/")[2])
    kind = normalize_name(settings.get("model_train_type") or "")
    if kind and "lora" not in kind:
        raise refuse_method("model_train_type", f"{for_message(settings['model_train_type'])} trains no adapter")
    module = str(settings.get("network_module") or "")
    word = ""
    if match := re.fullmatch(r"(\w*?)_?train_network(_xl)?\w*", name):
        word = match[1] or ("sdxl" if match[2] else "sd")
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
    """A model that is named after it, its resolution, or what only its script takes."""
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
    if normalize_name(settings.get("model_version")) in _EDITING or any(
        not is_off(settings.get(each)) for each in ("edit", "edit_plus")
    ):
        version = for_message(settings.get("model_version") or "edit")
        raise ConfigError(
            f"model_version: {version} is a variant of Qwen-Image that cannot be trained here; {KNOWN} can"
        )
    if "control_net" in module or "controlnet" in module:
        raise refuse_method("network_module", "a ControlNet is trained")
    if not any(name.startswith(_ADAPTER_KEYS) for name in settings):
        if (script := str(settings.get("script") or "")) and "train_network" not in script:
            raise refuse_script(script)
        raise refuse_method("network_module", "is not set: a full fine-tune or DreamBooth trains the whole model")
    algorithm = normalize_name(_network_args(settings).get("algo", ""))
    if algorithm in ("full", "native"):
        raise refuse_method("network_args.algo", "full is a fine-tune of the whole model")


def import_kohya(settings: Mapping[str, Any], out: Translation, own: frozenset[str]) -> dict[str, Any]:
    """Translate into ``out``; returns the defaults that were used."""
    entries = {name: value for name, value in settings.items() if value is not None and value != ""}
    out.unset += [name for name in settings if name not in entries]
    ensure_network_script(entries)
    ensure_adapter(entries)
    out.family = kohya_family(entries)
    ensure_plain_base(entries.get("pretrained_model_name_or_path", ""), "pretrained_model_name_or_path")
    _remove_ignored(entries, out)
    implied = _implied(entries, out.family)
    complete = {**entries, **implied}
    _one_schedule(complete, out)
    dataset = _dataset(complete, out)
    translate(complete, KOHYA, own, out)
    if dataset is not None:
        out.fields["dataset"] = dataset
    read_times(out, complete)
    _shape(out, complete)
    if out.fields.get("buckets") is False:
        out.fields["upscale"] = True  # bucket_no_upscale is for buckets
    if "objective" not in out.fields:
        out.fields["objective"] = "flow" if out.family in FLOW else "epsilon"
    with_library_defaults(out)
    _checkpoints(out, entries)
    _samples(out, entries)
    refuse_hidden_dropout(out, "network_dropout")
    return {name: value for name, value in implied.items() if name not in out.without}


def _network_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return parse_pairs(settings.get("network_args") or [])
    except ValueError:
        return {}


def _remove_ignored(entries: dict[str, Any], out: Translation) -> None:
    for old, name in (("caption_extention", "caption_extension"),):
        if old in entries:  # an older spelling, which counts where both are set
            entries[name] = entries.pop(old)
            out.note(old, f"is called {name} today")
    ignored = ignored_settings(out.family)
    for name in [each for each in entries if each in ignored]:
        out.note(name, "is ignored for this model")
        del entries[name]
    if not is_off(entries.get("use_8bit_adam")) and "optimizer_type" not in entries:
        entries["optimizer_type"] = "AdamW8bit"
        entries.pop("use_8bit_adam")
    if not is_off(entries.get("use_lion_optimizer")) and "optimizer_type" not in entries:
        entries["optimizer_type"] = "Lion"
        entries.pop("use_lion_optimizer")
    for name in ("use_8bit_adam", "use_lion_optimizer"):
        if name in entries:
            out.note(name, "optimizer_type is used")
            del entries[name]
    if "dropout" in _network_args(entries) and is_lycoris(entries.get("network_module"), _network_args(entries)):
        entries.pop("network_dropout", None)  # that of network_args counts
    if out.family in MUSUBI:
        entries["network_train_unet_only"] = True  # it has no other
        ensure_musubi_arguments(out, entries)
    caches = [name for name in _CACHED_TEXT if not is_off(entries.get(name))]
    if caches and is_off(entries.get("network_train_unet_only")):
        if out.family not in FLOW:
            entries["network_train_unet_only"] = True  # its scripts demand it
        elif any(map(parse_number, _listed(entries.get("text_encoder_lr", 1)))):
            for name in caches:  # what T5 makes of captions is cached there, and CLIP is trained
                out.note(name, "captions are encoded in every step, because CLIP is trained")
                del entries[name]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _shape(out: Translation, settings: Mapping[str, Any]) -> None:
    """A rectangle, which buckets take as an area; without them every image is cropped to it."""
    try:
        sides = parse_sizes(settings.get("resolution") or 512)
    except ValueError:
        return  # reported where it is read
    if len(set(sides)) < 2 or out.fields.get("buckets", True) or settings.get("dataset_config"):
        return
    dataset = out.fields.get("dataset")
    if isinstance(dataset, str):
        dataset = {"datasets": [{"subsets": [{"image_dir": dataset, "numbered_folders": True}]}]}
    if not isinstance(dataset, dict):
        size = for_message(settings["resolution"])
        out.refuse(
            "resolution", f"{size} without buckets crops to a rectangle, which a dataset .toml says", "resolution"
        )
        return
    limits = {"resolution": sides[:2], "enable_bucket": False, "bucket_reso_steps": math.gcd(*sides[:2], 64)}
    tables = [{**table, **limits} for table in dataset["datasets"]]
    out.fields["dataset"] = {**dataset, "datasets": tables}
    out.mapping["resolution"] = "dataset"


def _implied(entries: Mapping[str, Any], family: str) -> dict[str, Any]:
    """kohya's defaults for what a file does not set."""
    sections = ("flow", *(("musubi",) if family in MUSUBI else ()), family) if family in FLOW else (family,)
    values = defaults("kohya", "values", *sections)
    if family in MUSUBI:
        for name in ignored_settings(family):
            values.pop(name, None) if name != "save_precision" else None
    if not is_off(entries.get("full_bf16")) or not is_off(entries.get("full_fp16")):
        values["save_precision"] = "bf16" if not is_off(entries.get("full_bf16")) else "fp16"  # as they are trained
    rate = entries.get("learning_rate") or entries.get("lr") or values["learning_rate"]
    only_unet = not is_off(entries.get("network_train_unet_only"))
    lasts = any(not is_off(entries.get(name)) for name in ("max_train_epochs", "epochs", "max_train_steps", "steps"))
    conditional: dict[str, Any] = {
        "learning_rate": None if entries.get("unet_lr") or entries.get("lr") else rate,
        "text_encoder_lr": None if only_unet or entries.get("text_encoder_lr") is not None else rate,
        "max_train_steps": None if lasts else values["max_train_steps"],
        "network_dropout": None if "dropout" in _network_args(entries) else values["network_dropout"],
    }
    if normalize_name(entries.get("loss_type")) in ("huber", "smoothl1"):
        values |= defaults("kohya", "huber")
    if entries.get("dataset_config"):  # the dataset says what is in it
        for name in ("enable_bucket", "caption_extension", "bucket_no_upscale", "min_bucket_reso", "max_bucket_reso",
                     "bucket_reso_steps"):  # fmt: skip
            conditional[name] = None
    if not is_off(entries.get("bucket_no_upscale")) and is_off(entries.get("max_bucket_reso")):
        conditional["max_bucket_reso"] = None  # images are not limited then
    ours = dict(KOHYA.plain) | {
        "network_alpha": "alpha", "mixed_precision": "precision", "max_train_steps": "steps", "save_precision": "save_dtype",
        "optimizer_type": "optimizer", "bucket_no_upscale": "upscale", "random_crop": "crop", "loss_type": "loss",
        "text_encoder_lr": "train_text_encoders", "timestep_sampling": "timestep_sampling",
    }  # fmt: skip
    return {
        name: value
        for name, value in (values | conditional).items()
        if value is not None and entries.get(name) in (None, "") and ours.get(name, name) not in entries
    }


def _one_schedule(settings: dict[str, Any], out: Translation) -> None:
    """What only one of two settings decides: epochs before steps, no warmup of a constant rate, own rates of adafactor."""
    if is_off(settings.get("max_train_epochs")) and "max_train_epochs" in settings:
        out.unset.append("max_train_epochs")
        del settings["max_train_epochs"]
    if is_off(settings.get("max_train_steps")) and "max_train_steps" in settings:
        out.unset.append("max_train_steps")
        del settings["max_train_steps"]
    if normalize_name(settings.get("lr_scheduler")) == "constant" and not is_off(settings.get("lr_warmup_steps")):
        out.note("lr_warmup_steps", "lr_scheduler = constant has no warmup; constant_with_warmup has")
        settings["lr_warmup_steps"] = 0
    if normalize_name(settings.get("optimizer_type")) == "adafactor":
        arguments = settings.get("optimizer_args") or []
        try:
            relative = parse_bool(parse_pairs(arguments).get("relative_step", "true"))
        except ValueError:
            relative = False
        if relative:
            out.refuse("optimizer_type", "Adafactor with relative_step=True chooses its own learning rate", "optimizer")
    if not is_off(settings.get("sample_every_n_epochs")) and not is_off(settings.get("sample_every_n_steps")):
        out.note("sample_every_n_steps", "sample_every_n_epochs is used")
        settings["sample_every_n_steps"] = 0


def _dataset(settings: dict[str, Any], out: Translation) -> str | dict[str, Any] | None:
    """Several folders, or settings of captions that a run does not have, as the tables of a dataset."""
    if settings.get("dataset_config"):
        if settings.pop("train_data_dir", None):
            out.note("train_data_dir", "dataset_config is used")
        if settings.pop("reg_data_dir", None):
            out.note("reg_data_dir", "dataset_config is used")
        return None
    general = {}
    for name in _SUBSET:
        if not is_off(settings.get(name)):
            general[name] = parse_bool(settings[name]) if name in ("enable_wildcard", "alpha_mask") else settings[name]
            out.mapping[name] = "dataset"
        settings.pop(name, None)
    folder, regular = settings.get("train_data_dir"), settings.pop("reg_data_dir", None)
    if not folder or not (regular or general):
        return None
    subsets: list[dict[str, Any]] = [{"image_dir": folder, "numbered_folders": True}]
    out.mapping["train_data_dir"] = "dataset"
    settings.pop("train_data_dir")
    if regular:
        subsets.append({"image_dir": regular, "is_reg": True, "numbered_folders": True})
        out.mapping["reg_data_dir"] = "dataset"
    return {**({"general": general} if general else {}), "datasets": [{"subsets": subsets}]}


def _checkpoints(out: Translation, entries: Mapping[str, Any]) -> None:
    """kohya keeps every adapter, as we do where keep_last is not set, unless it is told to keep the last ones."""
    every, last = entries.get("save_every_n_epochs"), entries.get("save_last_n_epochs")
    if not is_off(every) and not is_off(last):
        out.no_equivalent[:] = [line for line in out.no_equivalent if not line.startswith("save_last_n_epochs:")]
        out.fields["keep_last"] = max(1, -(-int(parse_number(last)) // int(parse_number(every))))
        out.mapping["save_last_n_epochs"] = "keep_last"
    if out.fields.get("wandb"):
        project = entries.get("log_tracker_name")
        out.fields.setdefault("wandb_project", str(project or "network_train"))  # the scripts' own name
        if project:
            out.mapping["log_tracker_name"] = "wandb_project"
    if "logging_dir" in entries and "tensorboard" not in out.fields and is_off(entries.get("log_with")):
        out.fields["tensorboard"] = True
        out.mapping["logging_dir"] = "tensorboard"


_PROMPT_FLAGS = re.compile(r"\s--(?!(?:n|w|h|d|l|s|ss)\s)([a-z]+)(\s+(?!--)\S+)*", re.IGNORECASE)


def _samples(out: Translation, entries: Mapping[str, Any]) -> None:
    """Prompts, one per line where they are not a file; without any there are no samples."""
    prompts = out.fields.get("sample_prompts")
    if isinstance(prompts, str):
        lines = [line.strip() for line in prompts.splitlines()]
        prompts = [line for line in lines if line and not line.startswith("#")]
    cleaned = []
    for prompt in prompts or ():
        text = _PROMPT_FLAGS.sub("", str(prompt))
        if text != prompt:
            out.note("sample_prompts", f"{for_message(prompt)}: only --n --w --h --d --l --s and --ss are used")
        cleaned += [text] if text.strip() else []
    out.fields["sample_prompts"] = cleaned
    if not cleaned:
        for name in ("sample_every", "sample_every_epochs"):
            if out.fields.pop(name, 0):
                out.note("sample_prompts", "has no prompts, so no samples are generated")


def ensure_file_kind(settings: Mapping[str, Any]) -> None:
    """Refuse a table that holds none of kohya's settings."""
    if not settings:
        raise ConfigError("contains no settings")
