"""The dataset of kohya's scripts: its folders, or the file that dataset_config names, as tables of a dataset.

    train_data_dir, reg_data_dir     folders of numbered folders
    in_json                          a list of the images in train_data_dir, with their captions: a metadata_file
    dataset_config                   [general] < [[datasets]] < [[datasets.subsets]], paths from the current folder;
                                     what it leaves out is what the command says, or kohya's default

Regularization images are repeated, or left out, until they are as many as the others. A dataset file that is not next
to the configuration stays a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.toml import parse_json, parse_toml
from inweave.training.config.translate import Translation
from inweave.training.config.values import parse_bool, parse_int
from inweave.training.importers.datasets import is_absolute
from inweave.training.importers.kohya.flow import MUSUBI
from inweave.training.importers.musubi.datasets import is_musubi_dataset, musubi_tables
from inweave.training.importers.source import Source

#: settings of a command that only a dataset has
_SUBSET = ("keep_tokens_separator", "caption_prefix", "caption_suffix", "alpha_mask")
_FOLDERS = ("train_data_dir", "reg_data_dir", "in_json")


def kohya_dataset(out: Translation, source: Source) -> tuple[dict[str, Any] | None, frozenset[str]]:
    """Return the tables of the dataset, None for a plain folder or a path, and the settings that they are made of."""
    general: dict[str, Any] = {}
    for name in filter(out.is_on, _SUBSET):
        general[name] = parse_bool(out.get(name)) if name == "alpha_mask" else out.get(name)
        out.mapping[name] = "dataset"
    if config := out.get("dataset_config"):
        for name in filter(out.get, _FOLDERS):
            out.note(name, "dataset_config is used")
        parse = parse_json if str(config).endswith(".json") else parse_toml
        table = config if isinstance(config, Mapping) else source.read_file(str(config), parse)
        if table is None and is_absolute(str(config)):  # its folders are not known, so that no run could read them
            why = f"{for_message(config)}: is not on this machine; put it next to this file, or name a folder of images"
            out.unsupported("dataset_config", f"{why} with --dataset")
            out.mapping["dataset_config"] = "dataset"
            return None, frozenset({*_FOLDERS, "dataset_config", *general})
        return _tables_of_file(out, table, general), frozenset({*_FOLDERS, *general})
    return _tables_of_folders(out, general)


def _tables_of_file(out: Translation, table: Any, general: dict[str, Any]) -> dict[str, Any] | None:
    if table is None:
        why = f"{for_message(out.get('dataset_config'))}: is not next to this file; its path is kept, from the folder"
        out.unsupported("dataset_config", f"{why} that the run is started in")
    if not isinstance(table, Mapping) or not isinstance(table.get("datasets"), list):
        for name in general:
            out.mapping.pop(name)
            out.unsupported(name, "set it in the dataset .toml")
        return None
    if out.family in MUSUBI:
        return musubi_tables(table, out) if is_musubi_dataset(table) else None
    if out.is_on("dataset_repeats"):
        general["num_repeats"] = parse_int(out.get("dataset_repeats"))
        out.mapping["dataset_repeats"] = "dataset"
    own = table.get("general")
    usual = {"balance_regularization": True}
    return {**table, "general": usual | general | (dict(own) if isinstance(own, Mapping) else {})}


def _tables_of_folders(out: Translation, general: dict[str, Any]) -> tuple[dict[str, Any] | None, frozenset[str]]:
    folder, regular = out.get("train_data_dir"), out.get("reg_data_dir")
    metadata = out.get("in_json")
    used = frozenset({*_SUBSET, "reg_data_dir", *(("in_json",) if folder else ())})
    if not folder or not (regular or general or metadata):
        return None, used
    subsets: list[dict[str, Any]] = [{"image_dir": folder, "numbered_folders": True}]
    if metadata:  # the images of the folder itself
        if regular:
            out.note("reg_data_dir", "in_json is used")
        subsets, regular = [{"image_dir": folder, "metadata_file": str(metadata)}], None
        general |= {"num_repeats": parse_int(out.get("dataset_repeats"))} if out.is_on("dataset_repeats") else {}
        out.mapping["in_json"] = "dataset"
    out.mapping["train_data_dir"] = "dataset"
    if regular:
        general["balance_regularization"] = True
        subsets.append({"image_dir": regular, "is_reg": True, "numbered_folders": True})
        out.mapping["reg_data_dir"] = "dataset"
    dataset = {**({"general": general} if general else {}), "datasets": [{"subsets": subsets}]}
    return dataset, used | {"train_data_dir"}
