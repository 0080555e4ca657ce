"""The configuration of a request: typed, checked before any work starts, all problems at once.

    GenerateConfig(prompt="a red apple", steps=20, loras=["pixel:0.8"])

Fields left out take the model's own values: its size, its number of steps, its guidance, its sampler. Whatever is wrong
with the fields is one `ConfigError` that lists every problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, TypedDict

from pydantic import ConfigDict, Field, field_validator, model_validator

from inweave.adapter.strength_spec import parse_strength_spec
from inweave.arguments import expect
from inweave.checked import CheckedModel, FieldError
from inweave.errors import ConfigError, Problem
from inweave.files.paths import is_file
from inweave.generate.enlarge import Outpaint, UpscalePass
from inweave.generate.prompt import LoraTag, ParsedPrompt, parse
from inweave.models.sampler_names import sampler_name, sampler_refusal, schedule_name, schedule_refusal
from inweave.models.samplers import SAMPLERS, SCHEDULES

#: pixels over which a repainted area fades: a latent of most models; without, its border is a seam
FEATHER = 8

MAX_SEED = 2**64 - 1


class LoraChoice(CheckedModel):
    """One adapter of a stack: its location and its strength.

    Attributes:
        path: a file or a PEFT folder.
        name: the stem of a file in a LoRA folder, or the name recorded by its trainer.
        hash: SHA-256, BLAKE3, AutoV1, AutoV2 or AutoV3 of a file in a LoRA folder.
        strength: the strength of all components.
        te: the strength of the text encoders, if it differs.
        unet: the strength of the denoiser, if it differs.
        alpha: the alpha of modules whose file states none.

    Raises:
        ConfigError: not exactly one of path, name and hash is set, or a strength is not finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(default=None, description="a file or a PEFT folder")
    name: str | None = Field(
        default=None, description="a file's stem in a LoRA folder, or the name its trainer gave it"
    )
    hash: str | None = Field(
        default=None, description="SHA-256, BLAKE3, AutoV1, AutoV2 or AutoV3 of a file in a LoRA folder"
    )
    strength: float = Field(default=1.0, description="any finite number; negative and above 1 are in daily use")
    te: float | None = Field(default=None, description="strength of the text encoders, where it differs")
    unet: float | None = Field(default=None, description="strength of the denoiser, where it differs")
    alpha: float | dict[str, float] | None = Field(
        default=None, description="alpha of modules whose file states none: a number, or by rank or pattern"
    )

    @model_validator(mode="after")
    def _one_location(self) -> LoraChoice:
        if sum(location is not None for location in (self.path, self.name, self.hash)) != 1:
            raise ValueError("one of path, name and hash is needed, and only one")
        for field in ("strength", "te", "unet"):
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{field} must be a finite number, got {value}")
        return self

    @classmethod
    def from_tag(cls, tag: LoraTag) -> LoraChoice:
        """Return the choice of a tag in a prompt."""
        return cls(name=tag.name, te=tag.te, unet=tag.unet)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.path or self.name or self.hash or ""

    def strengths(self) -> dict[str, float]:
        """Return the strengths by component, as the weaver takes them."""
        return {
            "unet": self.strength if self.unet is None else self.unet,
            "te": self.strength if self.te is None else self.te,
        }

    @classmethod
    def parse(cls, text: str) -> LoraChoice:
        """Parse NAME[:STRENGTH] as `inweave.adapter.strength_spec` defines it; NAME may be a path."""
        expect("a LoRA", text, str)
        spec = parse_strength_spec(text)
        unknown = [component for component in spec.components if component not in ("te", "unet")]
        if unknown:
            raise ConfigError(f"{text}: {unknown[0]} has no strength of its own here; use te and unet")
        options = dict(spec.components) if spec.overall is None else {"strength": spec.overall, **spec.components}
        is_path = "/" in spec.name or "\\" in spec.name or spec.name.endswith(".safetensors") or is_file(spec.name)
        fields: dict[str, Any] = {"path" if is_path else "name": spec.name, **options}
        return cls(**fields)


class ImagePrompt(CheckedModel):
    """The prompts of one image, after its random choices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    negative_prompt: str = ""


class Template(CheckedModel):
    """The prompts as they were written, and the styles that were added to them (`inweave.generate.templates`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    negative_prompt: str = ""
    styles: tuple[str, ...] = ()


class RequestSettings(TypedDict, total=False):
    """The fields of a `GenerateConfig` besides the prompt and input images, as keyword arguments of a pipeline."""

    negative_prompt: str | None
    steps: int | None
    guidance: float | None
    guidance_scale: float | None
    seed: int | None
    width: int | None
    height: int | None
    sampler: str | None
    schedule: str
    loras: Iterable[str | LoraChoice | Mapping[str, Any]] | str | None
    clip_skip: int | None
    count: int
    strength: float
    feather: int
    keep_unmasked: bool
    styles: Iterable[str]
    outpaint: Outpaint | Mapping[str, Any] | None
    upscale: UpscalePass | Mapping[str, Any] | None


class GenerateConfig(CheckedModel):
    """One request for images; the description of every field is in its schema.

    Input images may be paths in the configuration, or objects passed along with it. Fields left out take the model's
    own values.

    Raises:
        ConfigError: one problem for each invalid field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(
        description="what to generate, or nothing at all; (word:1.2) weights and <lora:name:0.8> tags are understood"
    )
    negative_prompt: str = Field(default="", description="what to avoid; needs guidance above 1")
    steps: Annotated[int, Field(ge=1, le=150)] | None = Field(default=None, description="sampling steps, 1 to 150")
    guidance: Annotated[float, Field(ge=0, le=30)] | None = Field(
        default=None, description="guidance scale (CFG), 0 to 30: how closely to follow the prompt"
    )
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = Field(
        default=None, description="same seed, same image; -1: random"
    )
    width: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] | None = Field(
        default=None, description="pixels, 64 to 4096, a multiple of 8"
    )
    height: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] | None = Field(
        default=None, description="pixels, 64 to 4096, a multiple of 8"
    )
    sampler: str | None = Field(
        default=None, description=f"{', '.join(SAMPLERS)}, or the name that another program uses"
    )
    schedule: str = Field(default="simple", description=", ".join(SCHEDULES))
    loras: tuple[LoraChoice, ...] = Field(default=(), description="adapters, applied together")
    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = Field(
        default=None, description="2 uses CLIP's layer before the last"
    )
    count: Annotated[int, Field(ge=1, le=100)] = Field(
        default=1, description="number of images, with consecutive seeds"
    )
    init: str | None = Field(default=None, description="an image to start from (image to image)")
    strength: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.75, description="denoising strength: 0 keeps the starting image, 1 ignores it"
    )
    mask: str | None = Field(default=None, description="an image that is white where to repaint (inpainting)")
    references: tuple[str, ...] = Field(
        default=(), description="images that an edit model sees besides the prompt, in order"
    )
    feather: Annotated[int, Field(ge=0, le=256)] = Field(
        default=FEATHER, description="pixels over which new fades into old, inside the mask"
    )
    keep_unmasked: bool = Field(default=True, description="pixels outside the mask stay unchanged, bit for bit")
    styles: Annotated[tuple[str, ...], Field(max_length=50)] = Field(
        default=(), description="named texts that are added to the prompts"
    )
    outpaint: Outpaint | None = Field(default=None, description="paint beyond the sides of the image in `init`")
    upscale: UpscalePass | None = Field(default=None, description="enlarge every image (hires fix)")
    template: Template | None = Field(
        default=None, description="what the prompts were resolved from; with it they are not resolved again"
    )
    image_prompts: Annotated[tuple[ImagePrompt, ...], Field(max_length=100)] = Field(
        default=(), description="the prompts of each image, where random choices made them different"
    )

    @field_validator("loras", mode="before")
    @classmethod
    def _parse_loras(cls, value: Any) -> Any:
        try:
            return parse_loras(() if value is None else value)
        except ConfigError as error:
            raise ValueError("; ".join(map(str, error.problems))) from None  # collected with all the others

    @field_validator("sampler")
    @classmethod
    def _known_sampler(cls, value: str | None) -> str | None:
        if value is not None and value not in SAMPLERS:
            raise ValueError(sampler_refusal(value))
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        if value not in SCHEDULES:
            raise ValueError(schedule_refusal(value))
        return value

    @model_validator(mode="after")
    def _readable_tags(self) -> GenerateConfig:
        if wrong := [problem for parsed in self.prompts for problem in parsed.problems]:
            raise FieldError(Problem(wrong[0].field, "; ".join([wrong[0].text, *map(str, wrong[1:])])))
        return self

    @model_validator(mode="after")
    def _one_prompt_per_image(self) -> GenerateConfig:
        if self.image_prompts and (len(self.image_prompts) != self.count or self.seed in (None, -1)):
            reason = f"expected one for each of {self.count} images, and a seed; leave it out to have choices made"
            raise FieldError(Problem("image_prompts", reason))
        return self

    @model_validator(mode="before")
    @classmethod
    def _names_of_others(cls, data: Any) -> Any:
        """Accept samplers by any name in use; one that carries a schedule ("DPM++ 2M Karras") sets it.

        `guidance_scale`, the name of the guidance in other programs, and a null negative prompt are accepted too.
        """
        if isinstance(data, dict):
            data = dict(data)
            if isinstance(data.get("sampler"), str):
                data["sampler"], schedule = sampler_name(data["sampler"])
                if schedule is not None and "schedule" not in data:
                    data["schedule"] = schedule
            if isinstance(data.get("schedule"), str):
                data["schedule"] = schedule_name(data["schedule"])
            if data.get("negative_prompt", "") is None:
                data["negative_prompt"] = ""
            if "guidance_scale" in data:
                scale = data.pop("guidance_scale")
                if data.get("guidance") is not None and scale is not None and data["guidance"] != scale:
                    raise ValueError("guidance and guidance_scale are two names of one setting; give one of them")
                data["guidance"] = data.get("guidance") if scale is None else scale
        return data

    @cached_property
    def prompts(self) -> tuple[ParsedPrompt, ParsedPrompt]:
        """The positive and the negative prompt as weighted text and LoRA tags, parsed when the fields are validated."""
        return parse(self.prompt), parse(self.negative_prompt, negative=True)

    def tagged_loras(self) -> tuple[LoraChoice, ...]:
        """Return the adapters that tags in the prompts name, of all images."""
        own = [self.prompts]
        own += [(parse(each.prompt), parse(each.negative_prompt, negative=True)) for each in self.image_prompts[1:]]
        tags = [tag for prompts in own for parsed in prompts for tag in parsed.tags]
        return tuple(map(LoraChoice.from_tag, tags if not self.image_prompts else dict.fromkeys(tags)))


def parse_loras(entries: Iterable[str | LoraChoice | Mapping[str, Any]]) -> tuple[LoraChoice, ...]:
    """Return choices given as text, mappings, or choices; every problem is in one error."""
    choices: list[LoraChoice] = []
    wrong: list[str | Problem] = []
    if isinstance(entries, str | LoraChoice | Mapping):
        entries = [entries]
    if not isinstance(entries, Iterable):
        raise ConfigError(f"expected a list such as ['pixel:0.8'], got {type(entries).__name__}")
    for entry in entries:
        try:
            if isinstance(entry, LoraChoice):
                choices.append(entry)
            elif isinstance(entry, str):
                choices.append(LoraChoice.parse(entry))
            elif isinstance(entry, Mapping):
                choices.append(LoraChoice.model_validate(entry))
            else:
                wrong.append(f"expected 'NAME[:STRENGTH]', a LoraChoice or its fields, got {type(entry).__name__}")
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(wrong)
    return tuple(choices)
