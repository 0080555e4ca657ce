"""A model that answers requests: text to image, image to image, inpainting, with any stack of LoRAs.

    pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
    image = pipe("a red apple", steps=20, seed=7).images[0]
    pipe.swap(["ink:1.0"])

A request is checked whole before any work starts: limits, sampler, LoRA files, whether each LoRA fits the model, input
pictures; everything that is wrong comes back in one error. LoRAs of a request (in its list or as tags in its prompt)
are woven for it on top of the pipeline's own stack; the next request gets its own.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from inweave.errors import ConfigError, FormatError, InweaveError, RequestError, TargetError
from inweave.exchange.load import load
from inweave.generate.config import GenerateConfig, LoraChoice, read_loras
from inweave.generate.denoise import Callbacks, Job, Progress, generate_image
from inweave.generate.find import LoraFinder, checked_request, hashes_of
from inweave.generate.images import ImageInput, mask_tensor, open_image, open_mask, paste, to_tensor, working_size
from inweave.generate.prompt import Parsed, Tag, parse
from inweave.generate.record import png_text
from inweave.models.families.base import Conditioning, ConditioningRequest
from inweave.models.model import Model, load_model
from inweave.models.samplers import own_sampler, problems
from inweave.targets.detect import detect
from inweave.weights.stack import Strength


@dataclass(frozen=True, slots=True)
class Woven:
    """One LoRA of a request: its file, its strengths, and what of the model it changes."""

    name: str
    path: Path
    te: float
    unet: float
    in_prompt: bool
    modules: int
    tensors: int

    def as_dict(self) -> dict[str, Any]:
        hashes = hashes_of(self.path) if self.path.is_file() else None
        return {
            "name": self.name, "te": self.te, "unet": self.unet, "in_prompt": self.in_prompt,
            "modules": self.modules, "tensors": self.tensors,
            "sha256": hashes.sha256 if hashes else None, "autov2": hashes.autov2 if hashes else None,
            "autov3": hashes.autov3 if hashes else None,
        }  # fmt: skip


@dataclass(slots=True)
class Result:
    """Pictures, and for each one the record that repeats it."""

    images: list[Image.Image]
    records: list[dict[str, Any]]
    loras: list[Woven]
    warnings: list[str] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str], number: int = 0) -> None:
        """One picture as PNG, with its settings in it."""
        self.images[number].save(Path(path), format="PNG", pnginfo=png_text(self.records[number]))


@dataclass(frozen=True, slots=True)
class _Settled:
    """A request with every question answered."""

    config: GenerateConfig
    positive: Parsed
    negative: Parsed
    loras: list[Woven]
    picture: Image.Image | None
    mask: Image.Image | None
    size: tuple[int, int]


class Pipeline:
    """Safe to call from several threads; one request runs at a time."""

    def __init__(
        self,
        model: Model,
        *,
        loras: Sequence[LoraChoice] = (),
        lora_folders: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.model = model
        self.finder = LoraFinder(lora_folders)
        self.loras: tuple[LoraChoice, ...] = tuple(loras)
        self._lock = threading.RLock()

    def swap(self, loras: Iterable[str | LoraChoice | Mapping[str, Any]]) -> int:
        """Another stack for the requests that follow; returns how many tensors were written."""
        choices = read_loras(loras)
        with self._lock:
            wrong: list[str] = []
            woven = self._woven(choices, (), wrong)
            if wrong:
                raise ConfigError(wrong)
            written = self.model.swap(_layers(woven))
            self.loras = choices
            return written

    def __call__(
        self,
        prompt: str | GenerateConfig = "",
        *,
        init: ImageInput | None = None,
        mask: ImageInput | None = None,
        progress: Callable[[Progress], object] | None = None,
        preview_every: int = 0,
        cancelled: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> Result:
        """Generate. Settings are the fields of `GenerateConfig`; pictures may be given as objects."""
        if not isinstance(prompt, GenerateConfig):
            config = checked_request({"prompt": prompt, **settings}, self.finder)
        elif settings:
            raise ConfigError(f"{', '.join(settings)}: give these inside the configuration")
        else:
            config = prompt
        callbacks = Callbacks(progress, preview_every, cancelled)
        with self._lock:
            return self._run(self.settle(config, init, mask), callbacks)

    def settle(
        self, config: GenerateConfig, init: ImageInput | None = None, mask: ImageInput | None = None
    ) -> _Settled:
        """Check everything and fill in the model's own values; no denoising yet."""
        wrong: list[str] = []
        positive, negative = parse(config.prompt), parse(config.negative_prompt)
        sampler = config.sampler or own_sampler(self.model.blueprint.scheduler)
        wrong += problems(sampler, config.schedule, flow=self.model.flow)
        picture, hole = self._pictures(config, init, mask, wrong)
        size = self._size(config, picture, wrong)
        woven = self._woven((*self.loras, *config.loras), (*positive.tags, *negative.tags), wrong)
        if wrong:
            raise ConfigError(wrong)
        variant = self.model.blueprint.variant
        seed = secrets.randbits(32) if config.seed in (None, -1) else config.seed
        settled = config.model_copy(
            update={
                "sampler": sampler,
                "steps": config.steps or (variant.steps if variant else self.model.family.steps),
                "guidance": self._guidance(config),
                "seed": seed,
                "width": size[0],
                "height": size[1],
            }
        )
        return _Settled(settled, positive, negative, woven, picture, hole, size)

    def _guidance(self, config: GenerateConfig) -> float:
        if config.guidance is not None:
            return config.guidance
        variant = self.model.blueprint.variant
        return variant.guidance if variant is not None else self.model.family.guidance

    def _pictures(
        self, config: GenerateConfig, init: ImageInput | None, mask: ImageInput | None, wrong: list[str]
    ) -> tuple[Image.Image | None, Image.Image | None]:
        first, second = init if init is not None else config.init, mask if mask is not None else config.mask
        if first is None:
            if second is not None:
                wrong.append("mask: there is no picture to repaint; give one as init")
            return None, None
        try:
            picture = open_image(first, "init")
            return picture, open_mask(second, picture.size) if second is not None else None
        except RequestError as error:
            wrong.append(str(error))
            return None, None

    def _size(self, config: GenerateConfig, picture: Image.Image | None, wrong: list[str]) -> tuple[int, int]:
        native, patch = self.model.size, self.model.patch
        width, height = (native, native) if picture is None else working_size(picture.size, native, patch)
        width, height = config.width or width, config.height or height
        for name, side in (("width", width), ("height", height)):
            if side % patch:
                wrong.append(f"{name}: {side} is not a multiple of {patch}, which this model needs")
        return width, height

    def _woven(self, choices: Sequence[LoraChoice], tags: Sequence[Tag], wrong: list[str]) -> list[Woven]:
        """The files of all LoRAs, each proved to fit the model."""
        named = [(choice, False) for choice in choices]
        for tag in tags:
            try:
                named.append((LoraChoice.tagged(tag), True))
            except ConfigError as error:
                wrong.append(f"prompt: <lora:{tag.name}>: {error}")
        found: list[Woven] = []
        for choice, in_prompt in named:
            try:
                path = self.finder.find(choice)
                modules, tensors = self._fit(path)
            except InweaveError as error:
                wrong.append(str(error))
                continue
            strengths = choice.strengths()
            found.append(Woven(path.stem if path.is_file() else path.name, path, strengths["te"], strengths["unet"],
                               in_prompt, modules, tensors))  # fmt: skip
        return found

    def _fit(self, path: Path) -> tuple[int, int]:
        """(modules, tensors) of the model the adapter changes; an adapter of another base says which."""
        try:
            report = self.model.weaver.plan(path).report
        except TargetError as error:
            made_for = detect(load(path)).base
            mine = self.model.blueprint.variant.name if self.model.blueprint.variant else self.model.name
            hint = (
                f"LoRA {path.name}: made for {made_for}, this model is {mine}: " if made_for else f"LoRA {path.name}: "
            )
            raise TargetError(hint + str(error).splitlines()[0]) from None
        except FormatError as error:
            raise FormatError(f"LoRA {error}") from None
        return report.modules, report.placed

    def _run(self, request: _Settled, callbacks: Callbacks) -> Result:
        config = request.config
        assert config.seed is not None and config.steps is not None and config.guidance is not None
        assert config.sampler is not None
        self.model.swap(_layers(request.loras))
        width, height = request.size
        conditioning = self._conditioning(request)
        picture = to_tensor(request.picture, request.size) if request.picture is not None else None
        mask = mask_tensor(request.mask, request.size) if request.mask is not None else None
        images: list[Image.Image] = []
        records: list[dict[str, Any]] = []
        warnings = [*request.positive.warnings, *request.negative.warnings, *conditioning.warnings]
        callbacks = replace(callbacks, warn=warnings.append)
        for number in range(config.count):
            job = Job(conditioning, config.sampler, config.schedule, config.steps, config.seed + number, width, height, picture,
                      mask, config.strength)  # fmt: skip
            image = generate_image(self.model, job, callbacks, (number, config.count))
            images.append(_finished(image, request))
            records.append(self._record(request, config.seed + number))
        return Result(images, records, request.loras, list(dict.fromkeys(warnings)))

    def _conditioning(self, request: _Settled) -> Conditioning:
        config, texts = request.config, (request.positive.pieces, request.negative.pieces)
        assert config.guidance is not None
        return self.model.family.condition(
            self.model, ConditioningRequest(*texts, config.guidance, *request.size, config.clip_skip)
        )

    def _record(self, request: _Settled, seed: int) -> dict[str, Any]:
        config = request.config.model_copy(update={"seed": seed, "count": 1}).model_dump(exclude_none=True)
        config["loras"] = [
            {"name": lora.name, "te": lora.te, "unet": lora.unet} for lora in request.loras if not lora.in_prompt
        ]
        variant = self.model.blueprint.variant
        return {
            "config": config,
            "model": {
                "name": self.model.name,
                "variant": variant.name if variant else None,
                "family": self.model.family.name,
            },
            "loras": [lora.as_dict() for lora in request.loras],
            "inputs": {
                name: hashlib.sha256(image.tobytes()).hexdigest()
                for name, image in (("init", request.picture), ("mask", request.mask))
                if image is not None
            },
        }


def _layers(woven: Sequence[Woven]) -> list[tuple[Path, Strength]]:
    return [(lora.path, Strength(components={"unet": lora.unet, "te": lora.te})) for lora in woven]


def _finished(image: Image.Image, request: _Settled) -> Image.Image:
    """At the size of the picture it was made from, with what lay outside the mask put back."""
    if request.picture is None:
        return image
    if image.size != request.picture.size:
        image = image.resize(request.picture.size, Image.Resampling.LANCZOS)
    if request.mask is not None and request.config.keep_unmasked:
        return paste(image, request.picture, request.mask, request.config.feather)
    return image


def pipeline(
    model: str | os.PathLike[str] = "inweave/emoji",
    *,
    loras: Iterable[str | LoraChoice | Mapping[str, Any]] = (),
    lora_folders: Iterable[str | os.PathLike[str]] = (),
    **options: Any,
) -> Pipeline:
    """Load a model, merging ``loras`` while its weights load; options are those of `load_model`."""
    choices, folders = read_loras(loras), list(lora_folders)
    finder = LoraFinder(folders)
    layers = [(finder.find(each), Strength(components=each.strengths())) for each in choices]
    return Pipeline(load_model(model, loras=layers, **options), loras=choices, lora_folders=folders)
