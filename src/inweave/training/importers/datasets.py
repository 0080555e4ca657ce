"""Folders that another trainer reads, as a dataset: one folder, or the tables of a dataset file.

    one folder, one resolution, no repeats   dataset = "folder", and its options as settings of the run
    otherwise                                dataset = {datasets = [{resolution, subsets = [{image_dir, ...}]}]}

A folder with several resolutions becomes one dataset per resolution: each image is trained at each of them. The tables
have the names of a dataset .toml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PureWindowsPath
from typing import Any

from inweave.training.config.translate import Translation

#: key of a dataset file -> setting of a run
_RUN_FIELDS = {
    "caption_extension": "caption_extensions", "shuffle_caption": "shuffle_tags", "keep_tokens": "keep_tokens",
    "caption_separator": "tag_separator", "caption_dropout_rate": "caption_dropout",
    "caption_tag_dropout_rate": "tag_dropout", "flip_aug": "flip",
    "random_crop": "crop", "enable_bucket": "buckets", "bucket_reso_steps": "bucket_step",
}  # fmt: skip
_DATASET_KEYS = (
    "resolution",
    "batch_size",
    "enable_bucket",
    "bucket_reso_steps",
    "bucket_no_upscale",
    "min_bucket_reso",
    "max_bucket_reso",
)


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder of images: the name of its setting, and its options under the names of a dataset file.

    Its ``path`` is empty if the images are somewhere else: then the command names a folder. Without ``resolutions``,
    the run's own counts.
    """

    where: str
    path: str
    resolutions: Sequence[int | list[int]]
    repeats: int = 1
    regularization: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def is_absolute(path: str) -> bool:
    """Return whether a path is an absolute one, on any system."""
    return path.startswith(("/", "\\")) or PureWindowsPath(path).is_absolute()


def put_folders(out: Translation, folders: list[Folder]) -> None:
    """Set the dataset, and the settings of the run that its folders have in common."""
    if not folders:
        return
    first = folders[0]
    put_options(out, first)
    plain = first.options.keys() <= _RUN_FIELDS.keys()
    if len(folders) == 1 and len(first.resolutions) == 1 and first.repeats == 1 and plain and not first.regularization:
        out.fields |= {"dataset": first.path} if first.path else {}
    else:
        out.fields["dataset"] = folder_tables(folders)
    out.mapping |= {folder.where: "dataset" for folder in folders}


def folder_tables(folders: Sequence[Folder]) -> dict[str, Any]:
    """Return folders as the tables of a dataset."""
    return {"datasets": [_table(folder, side) for folder in folders for side in (folder.resolutions or (None,))]}


def put_options(out: Translation, folder: Folder) -> None:
    """Set the options of a folder as settings of the run."""
    for key, ours in _RUN_FIELDS.items():
        if key in folder.options:
            value = folder.options[key]
            value = ("random" if value else "center") if key == "random_crop" else value
            out.fields[ours] = [value] if key == "caption_extension" else value
    out.fields["resolution"] = folder.resolutions[-1]


def _listed(table: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the tables in a list; the configuration reports anything else."""
    tables = table.get(name)
    return [each for each in tables if isinstance(each, Mapping)] if isinstance(tables, list) else []


def folders_in(tables: Mapping[str, Any]) -> set[str]:
    """Return the folders of images in the tables of a dataset."""
    subsets = [subset for table in _listed(tables, "datasets") for subset in _listed(table, "subsets")]
    return {folder for each in subsets if isinstance(folder := each.get("image_dir"), str)}


def with_folder(tables: Mapping[str, Any], folder: str) -> dict[str, Any] | None:
    """Return the tables of a dataset with another folder of images; None if they have several, or none."""
    if len(folders_in(tables)) != 1:
        return None
    replaced = [
        {**table, "subsets": [{**subset, "image_dir": folder} for subset in _listed(table, "subsets")]}
        for table in _listed(tables, "datasets")
    ]
    return {**tables, "datasets": replaced}


def _table(folder: Folder, side: int | list[int] | None) -> dict[str, Any]:
    options = folder.options
    subset = {"image_dir": folder.path, "num_repeats": folder.repeats}
    if folder.regularization:
        subset["is_reg"] = True
    subset |= {key: value for key, value in options.items() if key not in _DATASET_KEYS}
    return {
        **({} if side is None else {"resolution": side}),
        **{key: value for key, value in options.items() if key in _DATASET_KEYS},
        "subsets": [subset],
    }
