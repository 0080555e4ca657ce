"""TensorBoard and Weights & Biases, each through its own library.

    a record with a step     its numbers are points of curves
    a sample image           an image of its step, named after its prompt's number: sample/0, sample/1, ...

TensorBoard's event files cannot be truncated: a run that resumes at step n writes a purge of the later steps. Weights &
Biases gets the step as a separate number, and a resumed run continues the same run there, by the id in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from inweave.errors import ConfigError, FormatError
from inweave.files.images import read_image
from inweave.training.config.fields import ACCOUNT, names_where
from inweave.training.config.schema import TrainConfig
from inweave.training.output.metadata import public_config

#: numbers of a record that are not plotted
_NO_CURVE = {"step", "total", "time"}


class Tracker(Protocol):
    def write(self, step: int, numbers: Mapping[str, float], images: Mapping[str, Image.Image]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WandbRun:
    """The run at Weights & Biases: its project, name and configuration, and its id if it is resumed."""

    project: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


def wandb_run(config: TrainConfig) -> WandbRun | None:
    """Return the configured run, without paths of this machine; None if it is not enabled."""
    if not config.wandb:
        return None
    settings = public_config(config).model_dump(mode="json", exclude={*names_where(private=True), *ACCOUNT})
    return WandbRun(config.wandb_project, config.wandb_run_name or config.name, settings)


def require_tracker(package: str) -> None:
    """Raise ConfigError if the library of a tracker ("tensorboard" or "wandb") is not installed."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{package}: the {package} package is not installed; pip install 'inweave[{package}]', or set "
            f"{package} = false"
        )


class TensorBoardTracker:
    """Event files in ``folder``, which hide earlier records of the steps after ``since``."""

    def __init__(self, folder: Path, since: int) -> None:
        require_tracker("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._events = writer(str(folder), purge_step=since + 1)

    def write(self, step: int, numbers: Mapping[str, float], images: Mapping[str, Image.Image]) -> None:
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)
        for name, image in images.items():
            self._events.add_image(name, np.asarray(image), step, dataformats="HWC")
        self._events.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._events.close()


class WandbTracker:
    """A run of Weights & Biases with its files in ``folder``. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: WandbRun, folder: Path) -> None:
        require_tracker("wandb")
        self._library: Any = import_module("wandb")
        try:
            self._run = self._library.init(
                project=run.project, name=run.name, config=dict(run.config), id=run.id, dir=str(folder),
                resume="allow" if run.id else None,
            )  # fmt: skip
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # no key, no network, a project that may not be written
            raise ConfigError(
                f"wandb: the run cannot be logged to Weights & Biases: {error}; log in with `wandb login`, keep the "
                "run on this machine with WANDB_MODE=offline, or set wandb = false"
            ) from None
        self.id: str = self._run.id

    def write(self, step: int, numbers: Mapping[str, float], images: Mapping[str, Image.Image]) -> None:
        uploads = {name: self._library.Image(image) for name, image in images.items()}
        self._run.log({"step": step, **numbers, **uploads})

    def close(self) -> None:
        self._run.finish()


def curve_points(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that are plotted."""
    return {
        name: value
        for name, value in record.items()
        if name not in _NO_CURVE and isinstance(value, int | float) and not isinstance(value, bool)
    }


def sample_images(record: Mapping[str, Any]) -> dict[str, Image.Image]:
    """Return the image of a sample's record under the name of its prompt; empty for other records."""
    path = record.get("path")
    if record.get("event") != "sample" or not isinstance(path, str):
        return {}
    number = re.search(r"-(\d+)$", Path(path).stem)
    try:
        return {f"sample/{number[1] if number else 0}": read_image(path).image.convert("RGB")}
    except FormatError:  # moved away since it was written
        return {}
