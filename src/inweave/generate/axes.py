"""The settings of a table of images: its axes, and the request of each cell.

strength=0,0.5,1            all LoRAs of the request, tagged ones included, at these multiples of their strength
seed=1,2,3                  likewise steps, guidance, sampler, schedule, style, clip_skip, width, height
denoise=0.3,0.6             the strength of image to image, or else of the second pass (`upscale`)
prompt=cat,dog,"a, b"       the first text is looked for in the prompts, and the others take its place
model=a,b                   other models
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inweave.checked import did_you_mean
from inweave.errors import ConfigError, Problem
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.prompt import scaled_tags

AXES: dict[str, type] = {
    "strength": float, "seed": int, "steps": int, "guidance": float, "denoise": float, "sampler": str, "schedule": str,
    "prompt": str, "style": str, "model": str, "clip_skip": int, "width": int, "height": int,
}  # fmt: skip
MAX_CELLS = 100


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting and its values."""

    name: str
    values: tuple[float | str, ...]

    @staticmethod
    def parse(text: str) -> Axis:
        """Parse NAME=VALUE,VALUE,...; values that hold a comma are quoted."""
        name, equals, listed = text.partition("=")
        name = name.strip()
        kind = AXES.get(name)
        if kind is None or not equals:
            near = did_you_mean(name, AXES)
            known = f"write one of {', '.join(AXES)} and its values, such as strength=0,0.5,1"
            raise ConfigError(Problem("grid", f"{text[:100]!r}: {known}{near}"))
        values = [value.strip() for value in next(csv.reader([listed], skipinitialspace=True), [])]
        if not values or len(values) > MAX_CELLS:
            raise ConfigError(Problem("grid", f"{text[:100]!r}: expected 1 to {MAX_CELLS} values, got {len(values)}"))
        try:
            return Axis(name, tuple(kind(value) for value in values))
        except ValueError:
            numbers = f"a list of {'whole ' if kind is int else ''}numbers"
            raise ConfigError(Problem("grid", f"{text[:100]!r}: {listed[:100]!r} is not {numbers}")) from None

    def apply(self, config: GenerateConfig, value: float | str) -> GenerateConfig:
        """Return a request with a value of the axis; raise ConfigError where it cannot have it."""
        fields = config.model_dump(exclude_unset=True) | {"prompt": config.prompt}
        if self.name == "strength":
            fields["loras"] = [_scaled(lora, float(value)) for lora in config.loras]
            for name in ("prompt", "negative_prompt"):
                fields[name] = scaled_tags(getattr(config, name), float(value))
        elif self.name == "prompt":
            searched = str(self.values[0])
            if not searched or (searched not in config.prompt and searched not in config.negative_prompt):
                reason = f"the first value, {searched[:80]!r}, is looked for in the prompts, and is in neither"
                raise ConfigError(Problem("grid", f"prompt: {reason}"))
            for name in ("prompt", "negative_prompt"):
                fields[name] = getattr(config, name).replace(searched, str(value))
        elif self.name == "denoise" and config.upscale is not None and config.init is None:
            fields["upscale"] = {**fields["upscale"], "strength": value}
        elif self.name == "style":
            fields["styles"] = (*config.styles, *([str(value)] if value else []))
        elif self.name == "sampler":
            fields["sampler"] = value
            fields.pop("schedule", None)  # a name may carry one
        elif self.name != "model":
            fields["strength" if self.name == "denoise" else self.name] = value
        return GenerateConfig(**fields)

    def label(self, value: float | str) -> str:
        """Return the title of a row or a column."""
        if isinstance(value, str):
            return value if self.name in ("prompt", "model") else f"{self.name} {value or 'none'}"
        return f"{self.name} {value:g}" if abs(value) < 1e6 else f"{self.name} {value}"

    @property
    def text(self) -> str:
        """As an option spells it."""
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(
            [value if isinstance(value, str) else f"{value:.17g}" if isinstance(value, float) else value
             for value in self.values]
        )  # fmt: skip
        return f"{self.name}={line.getvalue()}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A request of a table, and the model it names."""

    config: GenerateConfig
    model: str | None = None


def cells_of(config: GenerateConfig, axes: Sequence[Axis]) -> list[list[Cell]]:
    """Return the table of requests of a sweep; raise ConfigError if it cannot be made."""
    if not 1 <= len(axes) <= 2:
        raise ConfigError(Problem("grid", f"a grid has one or two axes, got {len(axes)}"))
    if len({axis.name for axis in axes}) < len(axes):
        raise ConfigError(Problem("grid", f"both axes are {axes[0].name}; choose another one"))
    if any(axis.name == "strength" for axis in axes) and not (config.loras or config.tagged_loras()):
        reason = "a sweep over strength needs a LoRA of the request, in its list or its prompt"
        raise ConfigError(Problem("grid", reason))
    across, down = axes[0], axes[1] if len(axes) == 2 else None
    if (total := len(across.values) * (len(down.values) if down else 1)) > MAX_CELLS:
        raise ConfigError(Problem("grid", f"{total} images are too many; at most {MAX_CELLS} are possible"))
    config = config.model_copy(update={"count": 1})

    def cell(value: float | str, other: float | str | None) -> Cell:
        made = config if down is None or other is None else down.apply(config, other)
        pairs = [(across, value), *([(down, other)] if down is not None else [])]
        return Cell(across.apply(made, value), next((str(each) for axis, each in pairs if axis.name == "model"), None))

    return [[cell(value, other) for value in across.values] for other in (down.values if down else (None,))]


def _scaled(lora: LoraChoice, factor: float) -> dict[str, Any]:
    fields = lora.model_dump(exclude_none=True)
    return fields | {name: fields[name] * factor for name in ("strength", "te", "unet") if name in fields}
