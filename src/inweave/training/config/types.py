"""Building blocks of settings: types with limits, the facts of a setting, and rules by module pattern.

setting(group, default, description, task=, resume=, private=)

group      its heading in the documentation
task       "image": has no meaning when training on texts, and is refused there
resume     "same": a resumed run must have the same value; "content": the same content, at any path; "free": any
           value, since it changes no trained number (shard: by rounding alone)
private    a path or a device of the machine that trained: left out of the files that are written
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from inweave.adapter import ALGORITHMS, load_algorithms
from inweave.checked import CheckedModel, did_you_mean, for_message
from inweave.errors import ConfigError
from inweave.formats.dialects import WRITTEN, written_dialects
from inweave.patterns import regex

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PixelSide = Annotated[int, Field(ge=8, le=2**16)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]

#: networks of the setting `network`; those of other packages are known by the names of their algorithms
NETWORKS = ("lora", "locon", "dora", "loha", "lokr")
#: dialects of the setting `dialect`, in addition to those of other packages
OUTPUT_DIALECTS = ("kohya", "onetrainer", "diffusers", "peft")


def _choice(names: tuple[str, ...], plugins: Callable[[], Collection[str]]) -> AfterValidator:
    """Return a validator of one of ``names`` or of ``plugins()``, which is called for other values alone."""

    def check(value: str) -> str:
        if value not in names and value not in (others := plugins()):
            *most, last = (*names, *others)
            expected = f"{', '.join(map(repr, most))} or {last!r}"
            raise ValueError(f"should be {expected}, got {for_message(value)}{did_you_mean(value, (*most, last))}")
        return value

    return AfterValidator(check)


def _other_networks() -> list[str]:
    load_algorithms()
    layers = {kind for kind, each in ALGORITHMS.items() if each.layer and not each.of_parameter}
    return [kind for kind in ALGORITHMS if kind in layers and kind not in NETWORKS]


def _other_dialects() -> list[str]:
    return [name for name in written_dialects() if name not in WRITTEN]


Network = Annotated[str, _choice(NETWORKS, _other_networks), WithJsonSchema({"type": "string", "enum": [*NETWORKS]})]
OutputDialect = Annotated[
    str, _choice(OUTPUT_DIALECTS, _other_dialects), WithJsonSchema({"type": "string", "enum": [*OUTPUT_DIALECTS]})
]

Resume = Literal["same", "content", "free"]


def setting(
    group: str,
    default: Any,
    description: str,
    *,
    task: Literal["image", "text", "both"] = "both",
    resume: Resume = "same",
    private: bool = False,
    min_length: int | None = None,
) -> Any:
    """Return a field with the facts that the rest of the program needs."""
    facts: dict[str, Any] = {"group": group, "task": task, "resume": resume, "private": private}
    return Field(default, description=description, min_length=min_length, json_schema_extra=facts)


def checked_resolution(value: Any) -> int | tuple[int, int] | None:
    """Return a side, or width and height, of training images; raises ValueError for anything else."""
    if value is None:
        return None
    try:
        sides = [int(side) for side in re.split("[,x]", value)] if isinstance(value, str) else value
    except ValueError:
        sides = ()
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    whole = [int(side) for side in sides if isinstance(side, int | float) and side == side // 1 and 16 <= side <= 8192]
    if len(whole) != len(sides) or len(sides) not in (1, 2):
        raise ValueError(f"expected a side, or [width, height], of 16 to 8192 pixels, got {for_message(value)}")
    return whole[0] if len(set(whole)) == 1 else (whole[0], whole[1])


def side_of(resolution: int | tuple[int, int]) -> int:
    """Return the side of the smallest square that holds the area of a resolution."""
    return resolution if isinstance(resolution, int) else isqrt(resolution[0] * resolution[1] - 1) + 1


def regex_problem(pattern: str) -> str:
    """Return the problem of a regular expression, with its position; empty if it is valid."""
    try:
        regex(pattern)
    except ConfigError as error:
        return str(error).replace("is not a regular", "is not a valid regular")
    return ""


def memory_bytes(text: str) -> int:
    """Return the bytes of 12GiB, 12G or 800MB: GiB and G are powers of 1024, GB of 1000."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])(i?B)?\s*", text, re.IGNORECASE)
    if match is None or not (number := float(match[1])):
        raise ConfigError(f'{for_message(text)} is not an amount of memory; write it as "12GiB", or "auto"')
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(number * base ** ("KMGT".index(match[2].upper()) + 1))


def warmup_in_steps(warmup: float, total: int) -> int:
    """Return a warmup in steps; one below 1 is a fraction of ``total``."""
    return round(warmup * total) if warmup < 1 else int(warmup)


class Rule(CheckedModel):
    """Settings of the modules that match a pattern; the first rule that matches a module wins."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pattern: str = Field(description="regular expression, searched in dotted module names")
    rank: PositiveInt | None = Field(default=None, description="rank of these modules")
    alpha: PositiveFloat | None = Field(default=None, description="alpha of these modules; none: their rank")
    learning_rate: PositiveFloat | None = Field(default=None, description="learning rate of these modules")
    skip: bool = Field(default=False, description="do not train these modules")

    @field_validator("pattern")
    @classmethod
    def _valid_regex(cls, value: str) -> str:
        if problem := regex_problem(value):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _sets_or_skips(self) -> Rule:
        values = [name for name in ("rank", "alpha", "learning_rate") if getattr(self, name) is not None]
        if self.skip and values:
            raise ValueError(f"skips its modules and also sets {', '.join(values)}")
        if not self.skip and not values:
            raise ValueError("sets nothing; set rank, alpha, learning_rate or skip")
        return self
