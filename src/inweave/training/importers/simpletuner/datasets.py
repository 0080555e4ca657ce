"""SimpleTuner's data backends: folders in a file of their own, each with its resolution, crop and captions.

repeats          how often an image is seen again: 0 is once
resolution       by resolution_type: pixel_area, the side of a square of that area; area, megapixels; pixel, the shorter
                 side
caption_shuffle  {enable, count, position_start, split_on}: shuffled tags
conditioning_data  the ids of other backends of the type conditioning, whose images are the references of an edit model
type             local: a folder; others (huggingface, aws, csv, ...) are not downloaded, and keep everything but it
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

_READ = names("""
    id type dataset_type disabled disable instance_data_dir instance_prompt caption_strategy only_instance_prompt
    prepend_instance_prompt resolution resolution_type repeats crop crop_aspect crop_style caption_shuffle
    conditioning_data
""")
#: beginnings of names that say where images come from and how they are stored
_HARMLESS = names("""
    cache_ metadata_ preserve_ scan_for vae_cache hash_ shorten_ default skip_file disable_validation write_batch
    dataset_name image_column video_column split revision streaming num_proc image_embeds text_embeds huggingface aws_
    max_retry csv_ webshart compress_ delete_ maximum_image target_down parquet
""")
_FILTERS = names("minimum_image_size minimum_aspect_ratio maximum_aspect_ratio max_upscale_threshold")
#: values that ask for nothing
_NEUTRAL = {"probability": 1, "start_epoch": 1, "start_step": 1, "train_batch_size": None}
_SEPARATORS = {"comma": ",", "space": " ", "period": "."}


def put_backends(out: Translation, source: Source, *, editing: bool = False) -> None:
    """Set the dataset, or the options of one if the file of backends is missing; ``editing``: with references."""
    listed = out.get("data_backend_config")
    backends = listed if isinstance(listed, list) else source.read_file(str(listed)) if listed is not None else None
    usual = {**defaults("simpletuner", "backend"), **out.settings}
    if not isinstance(backends, list):
        if listed is not None:
            why = "is not next to the configuration; put it there, or name a folder with --dataset"
            out.unsupported("data_backend_config", f"{for_message(listed)} {why}")
            out.mapping["data_backend_config"] = "dataset"
        put_options(out, _folder("data_backend_config", {**usual, "caption_strategy": "textfile"}, {}, out))
        return
    folders = backend_folders(out, backends, editing=editing)
    put_folders(out, folders)
    trained = [backends[int(folder.where.rpartition(".")[2])] for folder in folders]
    for name in ("resolution", "resolution_type", "caption_strategy"):
        if trained and all(backend.get(name) is not None for backend in trained):
            out.forget_default(name)
    out.mapping["data_backend_config"] = "dataset"


def backend_folders(out: Translation, backends: list[Any], *, editing: bool = False) -> list[Folder]:
    """Return the folders of the backends with images, which have no path if they are somewhere else."""
    usual = {**defaults("simpletuner", "backend"), **out.settings}
    folders = []
    conditions: dict[Any, tuple[int, Mapping[str, Any]]] = {
        backend.get("id"): (index, backend)
        for index, backend in enumerate(backends)
        if editing and isinstance(backend, Mapping) and backend.get("dataset_type") == "conditioning"
    }
    for index, backend in enumerate(backends):
        if not isinstance(backend, Mapping) or not is_off(backend.get("disabled", backend.get("disable"))):
            continue
        kind, at = str(backend.get("dataset_type", "image")), f"data_backend_config.{index}"
        if kind == "image":
            folder = _folder(at, {**usual, **backend}, backend, out)
            if not is_off(backend.get("conditioning_data")):
                folder.options["control"] = _references(at, backend, conditions, usual, out)
            folders.append(folder)
        elif backend.get("id") in conditions:
            out.mapping[f"data_backend_config.{index}"] = "dataset"
        elif kind not in ("text_embeds", "image_embeds", "eval"):
            out.refuse(f"{at}.dataset_type", f"{for_message(backend['dataset_type'])} is not supported")
    if len(folders) > 1:
        why = "SimpleTuner chooses backends at random; here each image is seen as often as its repeats say"
        out.unsupported("data_backend_config", why)
    return folders


def _folder(at: str, table: Mapping[str, Any], backend: Mapping[str, Any], out: Translation) -> Folder:
    """Return a backend as a folder; without a path if its images are somewhere else."""
    kind = str(backend.get("type", "local"))
    path = str(table.get("instance_data_dir") or "") if kind == "local" else ""
    if not path and backend:
        what = for_message(backend.get("dataset_name") or kind)
        out.unsupported(f"{at}.type", f"{what}: is not downloaded; name a folder of its images with --dataset")
    options = _captions(at, table, out)
    square = not is_off(table["crop"]) and normalize_name(table["crop_aspect"]) == "square"
    options["enable_bucket"] = not square
    style = normalize_name(table["crop_style"])
    options["random_crop"] = style == "random" and not is_off(table["crop"])
    if not is_off(table["crop"]) and style != "random" and not style.startswith("cent"):
        out.refuse(f"{at}.crop_style", f"{for_message(table['crop_style'])}: crops are random or centered")
    if not is_off(table["crop"]) and normalize_name(table["crop_aspect"]) not in ("square", "preserve"):
        out.refuse(f"{at}.crop_aspect", f"{for_message(table['crop_aspect'])}: crops are square, or keep the shape")
    side = parse_number(table["resolution"])
    if normalize_name(table.get("resolution_type")) == "area":
        side = round(side**0.5 * 1024)
    elif normalize_name(table.get("resolution_type")) == "pixel" and options["enable_bucket"]:
        out.unsupported(f"{at}.resolution_type", "pixel: a resolution is an area here, and not the shorter side")
    _refuse_others(at, backend, out)
    return Folder(at, path, [round(side)], parse_int(table["repeats"] or 0) + 1, options=options)


def _captions(at: str, table: Mapping[str, Any], out: Translation) -> dict[str, Any]:
    """Return the options of captions, and set the caption or trigger of the run."""
    options: dict[str, Any] = {"caption_extension": ".txt", "flip_aug": False}
    strategy = normalize_name(table["caption_strategy"])
    if strategy == "instanceprompt" or not is_off(table.get("only_instance_prompt")):
        out.put(f"{at}.instance_prompt", "caption", str(table.get("instance_prompt") or ""))
        options["caption_extension"] = ".no-captions"
    elif strategy in ("huggingface", "webshart") or (table.get("type", "local") != "local" and strategy == "filename"):
        out.note(f"{at}.caption_strategy", "the captions of a folder in its place are files next to its images")
    elif strategy != "textfile":
        why = "captions are files next to images; set caption_extensions for such files, or caption for one of all"
        out.refuse(f"{at}.caption_strategy", f"{for_message(table['caption_strategy'])}: {why}", "caption_extensions")
    if strategy != "instanceprompt" and not is_off(table.get("prepend_instance_prompt")):
        out.put(f"{at}.instance_prompt", "trigger", str(table.get("instance_prompt") or "").strip())
    shuffle = table.get("caption_shuffle")
    if isinstance(shuffle, Mapping) and not is_off(shuffle.get("enable")):
        options["shuffle_caption"] = True
        options["keep_tokens"] = parse_int(shuffle.get("position_start") or 0)
        separator = str(shuffle.get("split_on") or "comma")
        options["caption_separator"] = _SEPARATORS.get(separator, separator)
        count = parse_int(shuffle.get("count") or 1) + (not is_off(shuffle.get("include_original", True)))
        out.fields["caption_variants"] = max(count, out.fields.get("caption_variants", 1))
    return options


def _refuse_others(at: str, backend: Mapping[str, Any], out: Translation) -> None:
    """Refuse what changes training and has no place here; report what leaves images out."""
    for key, value in backend.items():
        where = f"{at}.{key}"
        if key in _READ or is_off(value) or value == _NEUTRAL.get(key, value is None):
            continue
        if key in _FILTERS:
            out.unsupported(where, f"{for_message(value)}: no image is left out for its size")
        elif key.startswith("is_regulari"):
            out.refuse(where, "the target of these images is the base model's own prediction, which is not supported")
        elif not key.startswith(_HARMLESS):
            out.refuse(where, f"{for_message(value)}: is not supported")


def _references(
    at: str,
    backend: Mapping[str, Any],
    conditions: Mapping[Any, tuple[int, Mapping[str, Any]]],
    usual: Mapping[str, Any],
    out: Translation,
) -> list[str]:
    """Return the folders of a backend's references; refuse what is not a folder, or is chosen at random."""
    listed = backend["conditioning_data"]
    ids = listed if isinstance(listed, list) else [listed]
    if missing := [each for each in ids if not isinstance(each, str) or each not in conditions]:
        why = "is not the id of a backend of references, which this model reads"
        out.refuse(f"{at}.conditioning_data", f"{for_message(missing[0])} {why}")
        return []
    if len(ids) > 1 and normalize_name(out.get("conditioning_multidataset_sampling", "random")) != "combined":
        why = "one of several references is chosen at random; here a model sees all of them"
        out.refuse(f"{at}.conditioning_data", f"{for_message(listed)}: {why} (combined)")
    folders = []
    for index, other in (conditions[each] for each in ids):
        where, kind = f"data_backend_config.{index}", normalize_name(other.get("conditioning_type"))
        path = other.get("instance_data_dir")
        if str(other.get("type", "local")) != "local" or not isinstance(path, str) or not path:
            out.refuse(f"{where}.type", f"{for_message(other.get('type'))}: references are images in a folder")
            continue
        if kind not in ("referencestrict", "referenceloose"):
            out.refuse(
                f"{where}.conditioning_type", f"{for_message(other.get('conditioning_type'))} is not a reference"
            )
        elif kind == "referencestrict":
            out.unsupported(where, "references keep their own shape here, they are not cut as their image")
        else:
            out.unsupported(where, "references are resized by the rule of the model, not by that of a backend")
            _put_reference_area(where, {**usual, **other}, out)
        folders.append(path)
    return folders


def _put_reference_area(where: str, table: Mapping[str, Any], out: Translation) -> None:
    side = parse_number(table["resolution"])
    side = round(side**0.5 * 1024) if normalize_name(table.get("resolution_type")) == "area" else round(side)
    if out.fields.get("reference_resolution", side) != side:
        other = out.fields["reference_resolution"]
        out.refuse(f"{where}.resolution", f"{side}: references have one size in a run, and others have {other}")
    out.fields["reference_resolution"] = side
