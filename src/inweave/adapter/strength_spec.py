"""The grammar of an adapter and its strength in text: options, configuration files and prompt tags.

    spec      = name (":" field)*
    field     = number                          the first: all of it; a second: text encoders, then the denoiser
              | part ("," part)*                by component
    part      = component "=" number
    component = "unet" | "te" | "te1" | "te2" | "te3" | "model"

    style                        strength 1
    style:0.8                    0.8 everywhere; any finite number, including negative ones
    style:0.5:0.8                text encoders 0.5, denoiser 0.8
    style:te=0.5,unet=0.8        the same by name, in any order; a colon separates as well as a comma
    C:\\loras\\style.safetensors   a path: fields are read from the end, and only while they are strengths, so
                                 drive letters and colons inside names stay part of the name

Components that are not named have the plain number, or 1. In a prompt tag (`<lora:name:te=0.5>`) the first colon ends
the name, everything after it must be a strength, and a denoiser without one uses that of the text encoders, as in other
front ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inweave.adapter.components import COMPONENTS
from inweave.errors import ConfigError

_PART = re.compile(r"\s*(\w+)\s*=\s*([^=/\\]*?)\s*")
_IGNORED = "dyn"  # a rank that dynamic resizing once took from tags


@dataclass(frozen=True, slots=True)
class StrengthSpec:
    """A parsed spec. ``overall``: the plain number, if there was one; ``components``: the strengths given by name."""

    name: str
    overall: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)

    @property
    def strength(self) -> float | dict[str, float]:
        """One number, or one for each component that differs."""
        if not self.components:
            return 1.0 if self.overall is None else self.overall
        if self.overall is None:
            return dict(self.components)
        return {"unet": self.overall, "te": self.overall, "model": self.overall, **self.components}


def parse_strength_spec(
    text: str, *, exists: Callable[[str], bool] = lambda name: False, tag: bool = False
) -> StrengthSpec:
    """Split NAME[:STRENGTH]; a name for which ``exists`` is true is never split."""
    fields: list[str] = []
    name = text
    while not exists(name):
        head, colon, last = name.rpartition(":")
        if not colon or (len(fields) == 2 and not tag and not any("=" in each for each in (last, *fields))):
            break
        if not _is_field(last):
            if tag or head.endswith(".safetensors") or exists(head):
                raise ConfigError(f"{text}: {last!r} is not a strength; write a number, or unet=0.8,te=0.2")
            break
        fields.insert(0, last)
        name = head
    name = name.strip() if fields or tag else name
    if not name:
        raise ConfigError(f"{text}: no name before the strength")
    return _spec(text, name, fields)


def _spec(text: str, name: str, fields: list[str]) -> StrengthSpec:
    numbers: list[float] = []
    components: dict[str, float] = {}
    for each in fields:
        if "=" not in each:
            numbers.append(_number(text, each))
            continue
        for part in each.split(","):
            match = _PART.fullmatch(part)
            component, value = (match[1], match[2]) if match else ("", part)
            if component == _IGNORED:
                continue
            if component not in COMPONENTS:
                raise ConfigError(f"{text}: unknown component {component!r}; use one of {', '.join(COMPONENTS)}")
            if component in components:
                raise ConfigError(f"{text}: {component} is given twice")
            components[component] = _number(text, value)
    if len(numbers) > 2:
        raise ConfigError(f"{text}: {len(numbers)} strengths; at most two are possible: text encoders, then denoiser")
    if len(numbers) == 2:
        return StrengthSpec(name, None, {"te": numbers[0], "unet": numbers[1], **components})
    return StrengthSpec(name, numbers[0] if numbers else None, components)


def _is_field(text: str) -> bool:
    """Return whether text after a colon has the form of a strength."""
    return all(_PART.fullmatch(part) for part in text.split(",")) if "=" in text else _float(text) is not None


def _number(text: str, value: str) -> float:
    number = _float(value)
    if number is None:
        raise ConfigError(f"{text}: {value!r} is not a number")
    if not math.isfinite(number):
        raise ConfigError(f"{text}: a strength must be a finite number, got {value.strip()}")
    return number


def finite_strength(value: object) -> float:
    """Return a strength as a float; raise ConfigError if it is not a finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ConfigError("a strength must be a finite number, got one beyond the range of floats") from None
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"a strength must be a finite number, got {repr(value)[:80]}")
    return number


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
