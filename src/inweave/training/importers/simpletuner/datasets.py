"""SimpleTuner's data backends: folders in a file of their own, each with its resolution, crop and captions.

repeats      how often an image is seen again: 0 is once
resolution   by resolution_type: pixel_area, the side of a square of that area; area, megapixels; pixel, the shorter
             side
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, normalize_name, parse_int, parse_number
from inweave.training.importers.datasets import Folder, put_folders, put_options
from inweave.training.importers.defaults import defaults
from inweave.training.importers.source import Source

_HARMLESS = names("""
    id type cache_ metadata_ preserve_ scan_for disabled dataset_type minimum_ maximum_ target_down vae_cache
    crop_aspect_buckets probability hash_ default skip_file instance_data instance_prompt caption_ resolution repeats
    crop disable_validation prepend_ only_instance is_regular write_batch parquet dataset_name image_embeds text_embeds
    huggingface aws_ max_retry csv_ slider start_
""")  # fmt: skip


def put_backends(out: Translation, source: Source) -> None:
    """Set the dataset, or the options of one if the file of backends is missing."""
    listed = out.get("data_backend_config")
    backends = listed if isinstance(listed, list) else source.read_file(str(listed)) if listed is not None else None
    usual = {**out.settings, **defaults("simpletuner", "backend")}
    if not isinstance(backends, list):
        if listed is not None:
            out.note("data_backend_config", f"{for_message(listed)} is not next to the configuration; set dataset")
        if (folder := _folder("data_backend_config", usual, {}, out)) is not None:
            put_options(out, folder)
        return
    folders = []
    for index, backend in enumerate(backends):
        if not isinstance(backend, Mapping) or not is_off(backend.get("disabled")):
            continue
        kind, at = str(backend.get("dataset_type", "image")), f"data_backend_config.{index}"
        if kind == "image":
            folder = _folder(at, {**usual, **backend}, backend, out)
            folders += [folder] if folder else []
        elif kind not in ("text_embeds", "image_embeds"):
            out.refuse(f"{at}.dataset_type", f"{for_message(backend['dataset_type'])} is not supported")
    put_folders(out, folders)
    out.mapping["data_backend_config"] = "dataset"


def _folder(at: str, table: Mapping[str, Any], backend: Mapping[str, Any], out: Translation) -> Folder | None:
    kind = str(table.get("type", "local"))
    if kind != "local":
        out.note(f"{at}.type", f"{for_message(kind)}: a dataset is a folder of images; set dataset to one")
        return None
    options: dict[str, Any] = {"caption_extension": ".txt", "flip_aug": False}
    strategy = normalize_name(table["caption_strategy"])
    if strategy == "instanceprompt" or not is_off(table.get("only_instance_prompt")):
        out.put(f"{at}.instance_prompt", "caption", str(table.get("instance_prompt") or ""))
        options["caption_extension"] = ".no-captions"
    elif strategy != "textfile":
        out.refuse(
            f"{at}.caption_strategy", f"{for_message(table['caption_strategy'])}: captions are files next to images"
        )
    elif not is_off(table.get("prepend_instance_prompt")):
        out.put(f"{at}.instance_prompt", "trigger", str(table.get("instance_prompt") or "").strip())
    square = not is_off(table.get("crop")) and normalize_name(table.get("crop_aspect", "square")) == "square"
    options["enable_bucket"] = not square
    style = normalize_name(table.get("crop_style", "random"))
    options["random_crop"] = style == "random" and not is_off(table.get("crop"))
    if not is_off(table.get("crop")) and style != "random" and not style.startswith("cent"):
        out.refuse(f"{at}.crop_style", f"{for_message(table['crop_style'])}: crops are random or centered")
    side = parse_number(table["resolution"])
    if normalize_name(table.get("resolution_type")) == "area":
        side = round(side**0.5 * 1024)
    elif normalize_name(table.get("resolution_type")) == "pixel" and options["enable_bucket"]:
        out.unsupported(f"{at}.resolution_type", "pixel: a resolution is an area here, and not the shorter side")
    for key, value in backend.items():
        if not key.startswith(_HARMLESS) and not is_off(value):
            out.refuse(f"{at}.{key}", f"{for_message(value)}: is not supported")
    path, repeats = str(table.get("instance_data_dir") or ""), parse_int(table["repeats"] or 0) + 1
    regular = any(key.startswith("is_regulari") and not is_off(value) for key, value in table.items())
    return Folder(at, path, [round(side)], repeats, regular, options)
