"""The files in which other trainers list their folders, as tables of a dataset.

    concepts.json           OneTrainer: [{"path": "a", "balancing": 2, "image": {...}, "text": {...}}]
    multidatabackend.json   SimpleTuner: [{"instance_data_dir": "a", "resolution": 1024, ...}]

A folder without a resolution of its own, which for a concept is one that is switched on, has the run's. Settings of the
run, such as a caption for all images, are refused: they have no place in a dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.config.translate import Translation
from inweave.training.config.values import parse_bool, with_setting_name
from inweave.training.importers.datasets import Folder, folder_tables
from inweave.training.importers.defaults import defaults
from inweave.training.importers.files import leaves_of
from inweave.training.importers.onetrainer.concepts import concept_folders
from inweave.training.importers.simpletuner.datasets import backend_folders

#: values of the run's settings that ask for nothing
_NEUTRAL: Final = {"caption_variants": 1, "trigger": ""}


def tables_of_list(listed: list[Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return (tables, what is done in another way here) of a list of folders; raise for what cannot be expressed."""
    try:
        out, folders, own, nowhere = _read(listed)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {with_setting_name(str(error), leaves_of({'entries': listed}))}") from None
    problems = [*out.problems, *(f"{name}: {why}" for name, why in out.refused.items())]
    problems += [f"{name}: expected a folder of images on this machine; name one, or remove it" for name in nowhere]
    problems += [f"entry {index} is not a table" for index, each in enumerate(listed) if not isinstance(each, Mapping)]
    problems += [
        f"sets {name} of the run to {for_message(value)}, which a dataset cannot; import the trainer's configuration "
        f"instead (inweave train --import), or remove it and set {name}"
        for name, value in out.fields.items()
        if value != _NEUTRAL.get(name)
    ]
    if problems or not folders:
        raise ConfigError([f"{path}: {problem}" for problem in problems or ["lists no folder of images"]])
    tables = [each if at in own else replace(each, resolutions=()) for at, each in _places(folders).items()]
    return folder_tables(tables), [f"{path.name}: {line}" for line in out.no_equivalent]


def _read(listed: list[Any]) -> tuple[Translation, list[Folder], set[str], list[str]]:
    """Return (translation, folders, those with a resolution of their own, settings that name no folder)."""
    marks = {name for each in listed if isinstance(each, Mapping) for name in each}
    if "path" in marks:
        settings = leaves_of({"concepts": listed})
        out = Translation({"resolution": "512", **settings}, "sdxl")
        folders = concept_folders(out)
        switch = "image.enable_resolution_override"
        own = {at for at in _places(folders) if parse_bool(settings.get(f"{at}.{switch}") or False)}
        nowhere = [f"concepts.{index}.path" for index, each in enumerate(listed) if _is_nowhere(each)]
    elif marks & {"instance_data_dir", "dataset_type"}:
        out = Translation(defaults("simpletuner", "values"), "sdxl")
        folders = backend_folders(out, listed)
        own = {at for at in _places(folders) if listed[int(at.rpartition(".")[2])].get("resolution")}
        nowhere = [f"{each.where}.instance_data_dir" for each in folders if not each.path]
    else:
        raise ConfigError("expected concepts of OneTrainer or data backends of SimpleTuner")
    return out, folders, own, nowhere


def _places(folders: list[Folder]) -> dict[str, Folder]:
    """Return folders by the name of their entry in the list."""
    return {folder.where.removesuffix(".path"): folder for folder in folders}


def _is_nowhere(concept: Any) -> bool:
    """Return whether a concept is to be trained on, and names no folder."""
    path = concept.get("path") if isinstance(concept, Mapping) else "-"
    return not (isinstance(path, str) and path) and parse_bool(concept.get("enabled", True))
