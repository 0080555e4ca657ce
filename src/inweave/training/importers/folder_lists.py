"""The files in which other trainers list their folders, as tables of a dataset.

    concepts.json           OneTrainer: [{"path": "a", "balancing": 2, "image": {...}, "text": {...}}]
    multidatabackend.json   SimpleTuner: [{"instance_data_dir": "a", "resolution": 1024, ...}]

What the run of the trainer would decide, such as resolutions that the list leaves out, is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError
from inweave.training.config.translate import Translation
from inweave.training.importers.datasets import folder_tables
from inweave.training.importers.defaults import defaults
from inweave.training.importers.files import leaves_of
from inweave.training.importers.onetrainer.concepts import concept_folders
from inweave.training.importers.settle import refuse
from inweave.training.importers.simpletuner.datasets import backend_folders


def tables_of_list(listed: list[Any], path: Path) -> dict[str, Any]:
    """Return the tables of a list of folders; raise for anything else, and for what cannot be expressed."""
    marks = {name for each in listed if isinstance(each, Mapping) for name in each}
    if "path" in marks:
        concepts = leaves_of({"concepts": listed})
        out = Translation({"resolution": "512", **concepts}, "sdxl")
        folders, open_options = concept_folders(out), not any(".resolution_override" in name for name in concepts)
    elif marks & {"instance_data_dir", "dataset_type"}:
        out = Translation(defaults("simpletuner", "values"), "sdxl")
        folders = backend_folders(out, listed)
        open_options = not any(isinstance(each, Mapping) and each.get("resolution") for each in listed)
    else:
        raise ConfigError(f"{path}: expected concepts of OneTrainer or data backends of SimpleTuner")
    try:
        refuse(out, {}, {})
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    if out.problems or not folders:
        raise ConfigError([f"{path}: {problem}" for problem in out.problems or ["lists no folder of images"]])
    return folder_tables([each for each in folders if each.path], open_resolution=open_options)
