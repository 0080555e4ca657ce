"""OneTrainer's concepts: the folders it trains on, each with its own images and captions.

    concepts.0.path, .enabled, .balancing      a folder, whether it is used, and how often each image is seen
    concepts.0.type                            STANDARD; PRIOR_PREDICTION: regularization; VALIDATION is not trained on
    concepts.0.image.enable_random_flip        augmentations; crop jitter is on by default, flips were until 2025-11
    concepts.0.text.prompt_source              sample: a .txt next to each image

OneTrainer chooses one of several resolutions at random, once per image and epoch. Here each image is trained at each of
them, so that with n resolutions an epoch is n times as long, and a run has n times fewer epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import (
    is_off,
    names,
    normalize_name,
    parse_bool,
    parse_int,
    parse_number,
    parse_sizes,
    with_setting_name,
)
from inweave.training.importers.datasets import Folder, put_folders, put_options
from inweave.training.importers.defaults import defaults
from inweave.training.importers.readers import entries_by_index, parse_resolutions

_UNKNOWN = "concepts of this type are not known here"
_HARMLESS = names(
    """
    name seed __version image_variations text_variations concept_stats balancing_strategy enabled path
    image.enable_crop_jitter image.enable_random_flip text.prompt_source text.keep_tags_count text.tag_delimiter
    text.enable_tag_shuffling text.tag_dropout_enable text.tag_dropout_probability text.tag_dropout_mode
    text.prompt_path balancing repeats resolution_override image.resolution_override type validation_concept
    image.enable_resolution_override include_subdirectories
    text.tag_dropout_special_tags text.tag_dropout_special_tags_mode text.tag_dropout_special_tags_regex
    text.caps_randomize_mode text.caps_randomize_probability text.caps_randomize_lowercase
    """
)  # fmt: skip


def put_concepts(out: Translation) -> None:
    """Set the dataset, and count the epochs of several resolutions."""
    resolutions = _resolutions(out)
    folders = concept_folders(out)
    put_folders(out, folders)
    if not folders:  # of a preset, which has none
        usual = {**defaults("onetrainer", "concept"), "path": "-"}
        if (folder := _folder("concepts", {}, usual, resolutions, out)) is not None:
            put_options(out, folder)
    count = len(resolutions)
    if count > 1:
        epochs = parse_int(out.fields.get("epochs") or out.get("epochs") or 100)
        out.fields["epochs"] = -(-epochs // count)
        how = f"an epoch trains all {count} of them here, so that {epochs} epochs are {out.fields['epochs']}"
        out.unsupported("resolution", how) if epochs % count else out.note("resolution", how)


def _resolutions(out: Translation) -> list[int | list[int]]:
    """Return the resolutions of a run: sides of areas, or one exact size as 512x768."""
    text = str(out.get("resolution") or "512")
    exact = parse_sizes(text) if "x" in text and "," not in text else []
    return [exact] if len(exact) == 2 else [*parse_resolutions(text)]


def concept_folders(out: Translation) -> list[Folder]:
    """Return the folders of the concepts that are trained on, and set how many captions of an image are encoded."""
    concepts = entries_by_index(out.settings, "concepts")
    if variations := [parse_int(each["text_variations"]) for each in concepts.values() if each.get("text_variations")]:
        out.fields["caption_variants"] = max(variations)
    resolutions = _resolutions(out)
    folders: list[Folder] = []
    for index, entries in concepts.items():
        at, values = f"concepts.{index}", {key: value for key, value in entries.items() if value is not None}
        concept = {**defaults("onetrainer", "concept"), **values}
        if not parse_bool(concept.get("enabled", True)):
            for key in entries:
                out.note(f"{at}.{key}", "belongs to a concept that is not enabled")
            continue
        if (kind := _kind(concept)) == "validation":
            why = "its images are not trained on; set validation_split, the fraction of the others that is held out"
            out.unsupported(f"{at}.type", f"{for_message(concept.get('path'))} is for validation: {why}")
            out.mapping |= {f"{at}.{key}": "dataset" for key in entries}
            continue
        if kind == "priorprediction":
            _put_prior(out, f"{at}.loss_weight", parse_number(concept.get("loss_weight", 1)))
        elif kind != "standard":
            out.refuse(f"{at}.type", f"{for_message(concept['type'])}: {_UNKNOWN}")
        try:
            folder = _folder(at, entries, concept, resolutions, out)
        except ValueError as error:
            out.problems.append(with_setting_name(str(error), {f"{at}.{key}": value for key, value in entries.items()}))
            continue
        folders += [folder] if folder else []
    return folders


def _put_prior(out: Translation, name: str, weight: float) -> None:
    """Set the target of regularization images, and their weight, which all concepts of this type have in common."""
    if out.fields.get("prior_prediction") and out.fields["prior_loss_weight"] != weight:
        out.refuse(name, f"{weight:g}: concepts of prior prediction have one weight, prior_loss_weight")
    out.fields |= {"prior_prediction": True, "prior_loss_weight": weight}


def _kind(concept: Mapping[str, Any]) -> str:
    """Return what the images of a concept are for; older files have a switch for validation instead of a type."""
    if not is_off(concept.get("validation_concept")):
        return "validation"
    return normalize_name(concept.get("type") or "STANDARD")


def _folder(
    at: str,
    entries: Mapping[str, Any],
    concept: Mapping[str, Any],
    resolutions: list[int | list[int]],
    out: Translation,
) -> Folder | None:
    path = concept.get("path")
    if not isinstance(path, str) or not path:
        return None
    prior = _kind(concept) == "priorprediction"
    repeats = parse_number(concept.get("balancing", concept.get("repeats", 1)))
    if repeats != int(repeats) or repeats < 1:
        out.refuse(f"{at}.balancing", f"{repeats:g}: images are repeated a whole number of times")
    if str(concept.get("balancing_strategy", "REPEATS")) != "REPEATS":
        out.refuse(f"{at}.balancing_strategy", f"{for_message(concept['balancing_strategy'])}: images are repeated")
    if concept["text.prompt_source"] != "sample":
        source = for_message(concept["text.prompt_source"])
        out.refuse(f"{at}.text.prompt_source", f"{source}: captions are files next to images")
    if parse_bool(concept.get("image.enable_resolution_override", False)):
        resolutions = [*parse_resolutions(concept.get("image.resolution_override") or 512)]
        if len(resolutions) > 1:
            why = f"each of its images is trained at all {len(resolutions)} of them in every epoch"
            out.unsupported(f"{at}.image.resolution_override", why)
    bucketing = parse_bool(out.get("aspect_ratio_bucketing", True)) and not isinstance(resolutions[0], list)
    options: dict[str, Any] = {
        "enable_bucket": bucketing,
        "caption_extension": ".txt", "flip_aug": parse_bool(concept["image.enable_random_flip"]),
        "random_crop": parse_bool(concept["image.enable_crop_jitter"]),
        "shuffle_caption": parse_bool(concept.get("text.enable_tag_shuffling", False)),
        "caption_separator": str(concept["text.tag_delimiter"]) or ",",
    }  # fmt: skip
    if not is_off(concept.get("include_subdirectories")):
        options["include_subfolders"] = True
    options["keep_tokens"] = parse_int(concept["text.keep_tags_count"]) if options["shuffle_caption"] else 0
    if parse_bool(concept.get("text.tag_dropout_enable", False)):
        options["caption_tag_dropout_rate"] = parse_number(concept.get("text.tag_dropout_probability", 0))
        if str(concept.get("text.tag_dropout_mode", "FULL")) == "FULL":
            out.unsupported(
                f"{at}.text.tag_dropout_mode", "FULL drops all tags at once; here each is dropped on its own"
            )
    for key, value in entries.items():
        name = f"{at}.{key}"
        if key in _HARMLESS:
            out.mapping.setdefault(name, "dataset")
        elif key == "loss_weight" and prior:
            out.mapping[name] = "prior_loss_weight"
        elif is_off(value) or (key == "loss_weight" and parse_number(value) == 1):
            out.unset.append(name)
        elif key.rpartition(".")[2].startswith("random_") or key.endswith(("_max_strength", "_max_angle")):
            out.unset.append(name)  # how strong an augmentation is; its switch decides
        else:
            out.refuse(name, f"{for_message(value)}: is not supported")
    return Folder(f"{at}.path", path, resolutions, int(repeats), prior, options=options)


def destination(out: Translation, name: str, value: Any) -> None:
    """Set the output folder and the name from the path of a file."""
    place = PurePosixPath(str(value).replace("\\", "/"))
    out.put(name, "name", place.stem or "lora")
    out.put(name, "output", str(place.parent))
