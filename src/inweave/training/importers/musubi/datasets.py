"""musubi-tuner's dataset file as tables of a dataset: its names, its defaults, and folders of images only.

    [general]                          resolution = [960, 544], enable_bucket, bucket_no_upscale, batch_size,
    [[datasets]]                       num_repeats, caption_extension; a dataset's own override them
    image_directory = "folder"         videos, control images and lists in .jsonl files cannot be expressed

Buckets have sides in steps of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off
from inweave.training.importers.defaults import defaults

_HARMLESS = ("cache_directory", "num_workers", "debug_dataset", "image_directory")
_OF_TABLES = ("resolution", "enable_bucket", "bucket_no_upscale", "batch_size")
_OF_SUBSETS = ("num_repeats", "caption_extension")


def is_musubi_dataset(table: Mapping[str, Any]) -> bool:
    """Return whether a table is its dataset file, and not one of sd-scripts, whose datasets have subsets."""
    listed = table.get("datasets")
    return isinstance(listed, list) and any(
        isinstance(each, Mapping) and any(name.startswith(("image_", "video_")) for name in each) for each in listed
    )


def musubi_tables(table: Mapping[str, Any], out: Translation) -> dict[str, Any]:
    """Return the tables of a dataset; options that they cannot express are refused."""
    general = table.get("general")
    usual = {**defaults("kohya", "musubi_dataset"), **(general if isinstance(general, Mapping) else {})}
    tables = []
    for index, dataset in enumerate(each for each in table["datasets"] if isinstance(each, Mapping)):
        merged, at = {**usual, **dataset}, f"dataset_config.datasets.{index}"
        for name, value in merged.items():
            if name not in (*_HARMLESS, *_OF_TABLES, *_OF_SUBSETS, "bucket_reso_steps") and not is_off(value):
                out.refuse(
                    f"{at}.{name}", f"{for_message(value)}: a dataset is a folder of images with captions next to them"
                )
        tables.append({
            **{name: merged[name] for name in (*_OF_TABLES, "bucket_reso_steps")},
            "subsets": [{"image_dir": str(merged.get("image_directory") or ""), **{n: merged[n] for n in _OF_SUBSETS}}],
        })  # fmt: skip
        out.mapping[f"{at}.image_directory"] = "dataset"
    return {"datasets": tables}
