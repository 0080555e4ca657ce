"""What a family declares as data: its networks and its published models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Prediction = Literal["epsilon", "v_prediction", "flow"]


@dataclass(frozen=True, slots=True)
class Network:
    """One network of a family: its folder in diffusers' layout, and the class it is built as."""

    folder: str
    class_name: str
    library: str = "diffusers"  # the module of the class: diffusers, transformers, or one of the family's package
    required: bool = True
    text_model: str = ""  # the language model inside of it, where that is built alone


@dataclass(frozen=True, slots=True)
class Variant:
    """A published model of a family, and the settings of a request that sets none.

    Finer than a base of `inweave.targets.bases`: SDXL and SDXL Turbo have the same tensors, SD 2.1 and SD 2.1-base too,
    yet they need another schedule, size or number of steps.
    """

    name: str
    family: str
    repo: str  # where its diffusers folder is published
    size: int  # pixels per side
    steps: int
    guidance: float  # 0: none is used
    prediction: Prediction = "epsilon"
    inpaint: bool = False
    zero_terminal_snr: bool = False  # trained on a schedule whose last step is pure noise
    base: str = ""  # the base whose tensors it has, where that has another name
    mark: str = ""  # the word in a file's metadata that tells it from its base
    pipeline: str = ""  # diffusers' class for it, where that is not its family's
    references: int | None = None  # reference images it reads at most, where that is not its family's number
    aliases: tuple[str, ...] = ()  # those `inweave.targets.bases` does not know, or knows as the base's

    @property
    def tensors(self) -> str:
        """The base of `inweave.targets.bases` that lists this variant's tensors."""
        return self.base or self.name
