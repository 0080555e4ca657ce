"""The files of LoRA_Easy_Training_Scripts, another interface of kohya's scripts: TOML with a section per tab.

    [[subsets]]                    image_dir, num_repeats, ...: the folders
    [TAB.args]                     options of the script; network_args and optimizer_args are tables
    [TAB.dataset_args]             [general] of the dataset file that it writes

Values that are false, zero or empty are not passed on; warmup_ratio is a share of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off
from inweave.training.importers.kohya.files import prepare_kohya, translate_kohya
from inweave.training.importers.source import Importer, Source

_LISTS = ("network_args", "optimizer_args", "lr_scheduler_args")


def _tabs(table: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the options of one part of every tab that are passed on."""
    tabs = [tab[part] for tab in table.values() if isinstance(tab, Mapping) and isinstance(tab.get(part), Mapping)]
    return {name: value for tab in tabs for name, value in tab.items() if not is_off(value)}


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    subsets = table.get("subsets")
    if not isinstance(subsets, list) or not _tabs(table, "args"):
        return None
    settings = _tabs(table, "args")
    for name in _LISTS:
        if isinstance(pairs := settings.get(name), Mapping):
            settings[name] = [f"{key}={_joined(value)}" for key, value in pairs.items() if value != ""]
            settings |= {"network_module": "lycoris.kohya"} if name == "network_args" and "algo" in pairs else {}
    if settings.pop("fa", False):
        settings["network_module"] = "networks.lora_fa"
    settings.setdefault("network_module", "networks.lora_flux" if "guidance_scale" in settings else "networks.lora")
    if ratio := settings.pop("warmup_ratio", 0):
        settings["lr_warmup_steps"] = ratio
    rows = [row for row in subsets if isinstance(row, Mapping)]
    folders = [{key: each for key, each in row.items() if key != "name" and not is_off(each)} for row in rows]
    general = _tabs(table, "dataset_args")
    settings |= {name: general.pop(name) for name in ("max_token_length",) if name in general}
    return {**settings, "dataset_config": {"general": general, "datasets": [{"subsets": folders}]}}


def _joined(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _prepare(source: Source) -> Translation:
    return prepare_kohya(source, source.settings)


IMPORTER = Importer("LoRA_Easy_Training_Scripts", _recognize, _prepare, translate_kohya)
