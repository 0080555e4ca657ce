"""musubi-tuner's dataset file as tables of a dataset: its names, its defaults, and folders of images only.

    [general]                          resolution = [960, 544], enable_bucket, bucket_no_upscale, batch_size,
    [[datasets]]                       num_repeats, caption_extension; a dataset's own override them
    image_directory = "folder"         videos, and lists in .jsonl files, cannot be expressed
    control_directory = "folder"       references of FLUX.2 and Qwen-Image-Edit, matched by name; cut as their image,
                                       unless no_resize_control, or control_resolution = [1024, 1024]

Buckets have sides in steps of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, parse_sizes
from inweave.training.importers.defaults import defaults

_HARMLESS = ("cache_directory", "num_workers", "debug_dataset", "image_directory")
_OF_TABLES = ("resolution", "enable_bucket", "bucket_no_upscale", "batch_size")
_OF_SUBSETS = ("num_repeats", "caption_extension")
_CONTROL = ("control_directory", "no_resize_control", "control_resolution")
_RENAMED = {
    "flux_kontext_no_resize_control": "no_resize_control", "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}  # fmt: skip


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
        merged = {_RENAMED.get(name, name): value for name, value in {**usual, **dataset}.items()}
        at = f"dataset_config.datasets.{index}"
        control = _control(merged, at, out) if out.family == "flux2" or edits(out.settings) else {}
        for name, value in merged.items():
            read = (*_HARMLESS, *_OF_TABLES, *_OF_SUBSETS, "bucket_reso_steps", *(_CONTROL if control else ()))
            if name not in read and not is_off(value):
                why = "a dataset is a folder of images, with captions next to them or in its metadata.jsonl"
                out.refuse(f"{at}.{name}", f"{for_message(value)}: {why}")
        tables.append({
            **{name: merged[name] for name in (*_OF_TABLES, "bucket_reso_steps")},
            "subsets": [{
                "image_dir": str(merged.get("image_directory") or ""), **{n: merged[n] for n in _OF_SUBSETS}, **control,
            }],
        })  # fmt: skip
        out.mapping[f"{at}.image_directory"] = "dataset"
    return {"datasets": tables}


def edits(settings: Mapping[str, Any]) -> str:
    """Return the version of Qwen-Image-Edit that a file trains, such as "edit-2509"; nothing for Qwen-Image."""
    version = str(settings.get("model_version") or "")
    if not version and not is_off(settings.get("edit_plus")):
        return "edit-2509"
    return version if version.startswith("edit") else ""


def _control(table: Mapping[str, Any], at: str, out: Translation) -> dict[str, Any]:
    """Return the folder of references as an option of a subset; report where they are resized in another way."""
    folder, sides = table.get("control_directory"), table.get("control_resolution")
    if not isinstance(folder, str) or not folder:
        return {}
    out.mapping[f"{at}.control_directory"] = "dataset"
    own, enlarges = not is_off(table.get("no_resize_control")), out.family != "flux2"
    if not is_off(sides):
        pair = parse_sizes(sides)
        _put_area(out, f"{at}.control_resolution", round((pair[0] * pair[-1]) ** 0.5))
    if not own and is_off(sides):
        out.unsupported(
            f"{at}.control_directory", "references keep their own shape here, they are not cut as their image"
        )
    elif own and enlarges:
        out.unsupported(f"{at}.no_resize_control", "smaller references of this model are enlarged here")
    elif not own and not enlarges:
        out.unsupported(f"{at}.control_resolution", "smaller references of this model are not enlarged here")
    elif enlarges:
        out.unsupported(f"{at}.control_resolution", "sides of references are multiples of 32 here, there of 16")
    if own and is_off(sides):
        _put_area(out, f"{at}.no_resize_control", 1024)
    return {"control": [folder]}


def _put_area(out: Translation, where: str, side: int) -> None:
    if out.fields.get("reference_resolution", side) != side:
        other = out.fields["reference_resolution"]
        out.refuse(where, f"references have one size in a run, and another dataset has {other}", "reference_resolution")
    out.fields["reference_resolution"] = side
    out.mapping[where] = "reference_resolution"
