"""ai-toolkit's datasets: its folders, each trained at each of its resolutions.

flip_x       every image twice, once flipped: a random flip of as many repeats
caption_ext  the extension of captions; caption_type is an older name, which counts where both are set
control_path a folder of references of an edit model, or a list of them; the form writes control_path_1 to _3

FLUX.2 and Qwen-Image-Edit read references of about a megapixel, or with match_target_res of the image's area; those of
Kontext are cut as their image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.translate import Translation
from inweave.training.config.values import (
    is_off,
    normalize_name,
    parse_bool,
    parse_int,
    parse_number,
    with_setting_name,
)
from inweave.training.importers.datasets import Folder
from inweave.training.importers.defaults import defaults
from inweave.training.importers.readers import entries_by_index, parse_resolutions

_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "caption_dropout_rate": ("caption_dropout_rate", parse_number), "shuffle_tokens": ("shuffle_caption", parse_bool),
    "token_dropout_rate": ("caption_tag_dropout_rate", parse_number), "keep_tokens": ("keep_tokens", parse_int),
    "flip_x": ("flip_aug", parse_bool), "random_crop": ("random_crop", parse_bool),
    "buckets": ("enable_bucket", parse_bool),
    "bucket_tolerance": ("bucket_reso_steps", parse_int), "caption_ext": ("caption_extension", str),
}  # fmt: skip
_DATA_HARMLESS = (
    "cache_", "num_workers", "prefetch", "type", "shrink_video", "do_i2v", "fps", "debug", "fast_image", "persistent",
    "full_size_control", "replay_", "gpu_", "control_transparent", "random_triggers_max", "auto_frame", "do_audio",
)  # fmt: skip
#: architectures that read references
EDITING = frozenset({"fluxkontext", "flux2", "flux2klein4b", "flux2klein9b", "qwenimageeditplus"})
_CONTROLS = ("control_path_1", "control_path_2", "control_path_3")
_READ = ("folder_path", "dataset_path", "resolution", "num_repeats", "is_reg", "default_caption", "caption_type")
_NEUTRAL = {"network_weight": 1.0, "loss_multiplier": 1.0, "scale": 1.0, "num_frames": 1, "guidance_type": "targeted"}


def architecture(out: Translation) -> str:
    """Return the architecture without its version."""
    return normalize_name(str(out.get("model.arch") or "").partition(":")[0])


def read_folders(out: Translation) -> list[Folder]:
    """Return the folders of the datasets, with their options under the names of a dataset file."""
    folders = []
    for index, entries in entries_by_index(out.settings, "datasets").items():
        at = f"datasets.{index}"
        table = {
            **defaults("ai_toolkit", "dataset"),
            **{key: value for key, value in entries.items() if value is not None},
        }
        path = table.get("folder_path") or table.get("dataset_path")
        if not isinstance(path, str) or not path:
            continue
        if path.endswith((".json", ".jsonl")):
            out.refuse(f"{at}.dataset_path", f"{for_message(path)}: a dataset is a folder")
        try:
            folders.append(_folder(at, path, table, out))
        except ValueError as error:
            out.problems.append(with_setting_name(str(error), {f"{at}.{key}": value for key, value in entries.items()}))
    if len({bool(folder.options.get("flip_aug")) for folder in folders}) > 1:
        # a share of the run, which counts steps
        return [replace(each, repeats=each.repeats * (2 if each.options.get("flip_aug") else 1)) for each in folders]
    return folders


def _folder(at: str, path: str, table: dict[str, Any], out: Translation) -> Folder:
    options: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{at}.{key}"
        if key in _OPTIONS:
            name, parse = _OPTIONS[key]
            options[name] = parse(value)
            out.mapping[where] = "dataset"
        elif key in _READ or (key in ("control_path", *_CONTROLS) and architecture(out) in EDITING):
            out.mapping[where] = "dataset"
        elif key == "alpha_mask" and parse_bool(value):
            options["alpha_mask"] = True
            out.put(where, "masked_loss", True)
        elif key == "square_crop" and parse_bool(value):
            options["enable_bucket"] = False
        elif key == "trigger_word" and value:
            out.put(where, "trigger", value)
        elif key.startswith(_DATA_HARMLESS):
            out.note(where, row.SPEED)
        elif is_off(value) or value == _NEUTRAL.get(key):
            out.unset.append(where)
        elif key == "mask_min_value" and is_off(table.get("alpha_mask")) and is_off(table.get("mask_path")):
            out.note(where, "there are no masks")
        else:
            out.refuse(where, f"{for_message(value)}: is not supported")
    if architecture(out) in EDITING and (control := _control(table)):
        options["control"] = control
        _report_references(at, table, out)
    if caption := table.get("default_caption"):
        out.put(f"{at}.default_caption", "caption", caption)
    extension = str(table.get("caption_type") or options.get("caption_extension", ".txt"))
    options["caption_extension"] = extension if extension.startswith(".") else f".{extension}"
    return Folder(
        f"{at}.folder_path", path, parse_resolutions(table["resolution"]), parse_int(table["num_repeats"]),
        not is_off(table.get("is_reg")), options,
    )  # fmt: skip


def _control(table: dict[str, Any]) -> list[str]:
    """Return the folders of references; those of the form replace control_path."""
    value = [table[name] for name in _CONTROLS if table.get(name)] or table.get("control_path") or []
    folders = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each for each in folders):
        raise ValueError(f"control_path: expected a folder or a list of folders, got {for_message(value)}")
    return folders


def _report_references(at: str, table: dict[str, Any], out: Translation) -> None:
    """Set the area of references; report where they are resized or mirrored in another way."""
    where = next(f"{at}.{name}" for name in (*_CONTROLS, "control_path") if table.get(name))
    differences = []
    if architecture(out) == "fluxkontext":
        if is_off(table.get("full_size_control_images", True)):
            out.refuse(f"{at}.full_size_control_images", "references of 512x512 pixels, of any shape, are not made")
        differences.append("references keep their own shape here, they are not cut as their image")
    elif is_off(out.get("model.model_kwargs.match_target_res")):
        out.fields["reference_resolution"] = 1024
    else:
        out.mapping["model.model_kwargs.match_target_res"] = "reference_resolution"
        if architecture(out) != "qwenimageeditplus":
            differences.append("references that are smaller than their image are not enlarged")
    if architecture(out) != "fluxkontext" and not is_off(table.get("flip_x")):
        differences.append("references are mirrored with their image")
    differences.append("transparent parts of references are white, not black")
    out.unsupported(where, "; ".join(differences))
