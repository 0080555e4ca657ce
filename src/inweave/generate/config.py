"""What to generate: one typed configuration, checked before any work starts, all problems at once.

Fields left out take the model's own values: its size, its number of steps, its guidance, its sampler.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from inweave.adapter.strength_spec import parse_strength_spec
from inweave.errors import ConfigError
from inweave.generate.prompt import Tag, parse
from inweave.models.samplers import SAMPLERS, SCHEDULES, sampler_name, schedule_name

MAX_SEED = 2**64 - 1
T = TypeVar("T", bound=BaseModel)


class LoraChoice(BaseModel):
    """One adapter of a stack: where it is, by path, name or hash, and how strongly it is applied."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(None, description="a file or a PEFT folder")
    name: str | None = Field(None, description="a file's stem in a LoRA folder, or the name its trainer gave it")
    hash: str | None = Field(None, description="SHA-256, AutoV2 or AutoV3 of a file in a LoRA folder")
    strength: float = Field(1.0, description="any finite number; negative and above 1 are in daily use")
    te: float | None = Field(None, description="strength of the text encoders, where it differs")
    unet: float | None = Field(None, description="strength of the denoiser, where it differs")

    @model_validator(mode="after")
    def _one_place(self) -> LoraChoice:
        if sum(place is not None for place in (self.path, self.name, self.hash)) != 1:
            raise ValueError("one of path, name and hash is needed, and only one")
        for field in ("strength", "te", "unet"):
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{field} must be a finite number, got {value}")
        return self

    @classmethod
    def tagged(cls, tag: Tag) -> LoraChoice:
        """The choice a tag in a prompt makes."""
        return checked(cls, {"name": tag.name, "te": tag.te, "unet": tag.unet})

    @property
    def label(self) -> str:
        return self.path or self.name or self.hash or ""

    def strengths(self) -> dict[str, float]:
        """By component, as the weaver takes them."""
        return {
            "unet": self.strength if self.unet is None else self.unet,
            "te": self.strength if self.te is None else self.te,
        }

    @classmethod
    def read(cls, text: str) -> LoraChoice:
        """NAME[:STRENGTH] as `inweave.adapter.strength_spec` defines it; NAME may be a path."""
        spec = parse_strength_spec(text)
        unknown = [component for component in spec.components if component not in ("te", "unet")]
        if unknown:
            raise ConfigError(f"{text}: {unknown[0]} has no strength of its own here; use te and unet")
        options = dict(spec.components) if spec.overall is None else {"strength": spec.overall, **spec.components}
        is_path = "/" in spec.name or "\\" in spec.name or spec.name.endswith(".safetensors")
        return checked(cls, {"path" if is_path else "name": spec.name, **options})


class GenerateConfig(BaseModel):
    """One request. Image inputs may be paths here, or pictures given beside the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(description="what to show; (word:1.2) weights and <lora:name:0.8> tags are understood")
    negative_prompt: str = Field("", description="what to keep away from; needs guidance above 1")
    steps: Annotated[int, Field(ge=1, le=150)] | None = Field(None, description="of the sampler, 1 to 150")
    guidance: Annotated[float, Field(ge=0, le=30)] | None = Field(None, description="how closely to follow, 0 to 30")
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = Field(None, description="same seed, same picture; -1: any")
    width: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] | None = Field(None, description="64 to 4096, by 8")
    height: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] | None = Field(None, description="64 to 4096, by 8")
    sampler: str | None = Field(None, description="euler, euler_ancestral, ddim, ddpm, dpm_solver_multistep, uni_pc")
    schedule: str = Field("simple", description="simple, karras, exponential, sgm_uniform, ddim_uniform")
    loras: tuple[LoraChoice, ...] = Field((), description="adapters, applied together")
    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = Field(
        None, description="2 takes CLIP's layer before the last"
    )
    count: Annotated[int, Field(ge=1, le=100)] = Field(1, description="pictures, with seeds counting up")
    init: str | None = Field(None, description="a picture to start from")
    strength: Annotated[float, Field(ge=0, le=1)] = Field(
        0.75, description="how far to leave it: 0 keeps it, 1 forgets it"
    )
    mask: str | None = Field(None, description="where to repaint: white")
    feather: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="pixels over which new fades into old, inside the mask"
    )
    keep_unmasked: bool = Field(True, description="pixels outside the mask stay as they are, bit for bit")

    @field_validator("loras", mode="before")
    @classmethod
    def _read_loras(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        try:
            return read_loras(value or ())
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from None  # collected with all the others

    @field_validator("sampler")
    @classmethod
    def _known_sampler(cls, value: str | None) -> str | None:
        if value is not None and value not in SAMPLERS:
            raise ValueError(f"{value!r} is unknown; known are {', '.join(SAMPLERS)}")
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        if value not in SCHEDULES:
            raise ValueError(f"{value!r} is unknown; known are {', '.join(SCHEDULES)}")
        return value

    @field_validator("prompt")
    @classmethod
    def _some_text(cls, value: str) -> str:
        parsed = parse(value)
        if not parsed.text:
            raise ValueError("there is no text in it" + (" beside its tags" if parsed.tags else ""))
        return value

    @model_validator(mode="after")
    def _readable_tags(self) -> GenerateConfig:
        wrong = [*parse(self.prompt).problems, *parse(self.negative_prompt).problems]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @model_validator(mode="before")
    @classmethod
    def _names_of_others(cls, data: Any) -> Any:
        """Samplers by any name in use; one that carries a schedule ("DPM++ 2M Karras") sets it."""
        if isinstance(data, dict):
            data = dict(data)
            if isinstance(data.get("sampler"), str):
                data["sampler"], schedule = sampler_name(data["sampler"])
                if schedule is not None and "schedule" not in data:
                    data["schedule"] = schedule
            if isinstance(data.get("schedule"), str):
                data["schedule"] = schedule_name(data["schedule"])
        return data

    @classmethod
    def of(cls, **fields: Any) -> GenerateConfig:
        """Checked: everything that is wrong comes back in one `ConfigError`."""
        return checked(cls, fields)


def read_loras(said: Iterable[str | LoraChoice | Mapping[str, Any]]) -> tuple[LoraChoice, ...]:
    """Choices in any form they are given in; all that is wrong with them comes back at once."""
    found: list[LoraChoice] = []
    wrong: list[str] = []
    for each in said:
        try:
            if isinstance(each, LoraChoice):
                found.append(each)
            else:
                found.append(LoraChoice.read(each) if isinstance(each, str) else checked(LoraChoice, dict(each)))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(wrong)
    return tuple(found)


def checked(kind: type[T], fields: dict[str, Any]) -> T:
    """Build a configuration, or say all that is wrong with it."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError([_told(kind, problem) for problem in error.errors()]) from None


def _told(kind: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), kind.model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(kind.model_fields)}"
        return f"{where}: there is no such setting{hint}"
    said = str(problem["msg"]).removeprefix("Value error, ")
    came = problem.get("input")
    shown = f", got {came!r}" if where and isinstance(came, int | float | bool) and "got" not in said else ""
    return f"{where}: {said}{shown}" if where else said
