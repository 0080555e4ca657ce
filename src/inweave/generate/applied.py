"""The LoRAs of a request: each one looked up, read, and proved to fit the model, with what it changes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inweave.adapter import Adapter
from inweave.errors import FormatError, InweaveError, TargetError
from inweave.exchange.load import load
from inweave.files.paths import is_file
from inweave.generate.config import LoraChoice
from inweave.generate.find import LoraFinder, adapter_of, hashes_of
from inweave.models.model import Model
from inweave.targets.detect import detect
from inweave.targets.plan import Plan
from inweave.weights.stack import Strength

OnMismatch = Literal["error", "warn"]
NOTED_LOSS = 0.1  # of the change of quantized weights, above which a result says so


@dataclass(frozen=True, slots=True)
class AppliedLora:
    """One LoRA of a request: its file, its strengths, and how much of the model it changes.

    ``source`` is merged: the file, the adapter with an alpha of the request, or the part of it that fits.
    """

    name: str
    path: Path
    te: float
    unet: float
    in_prompt: bool
    modules: int
    tensors: int
    source: Path | Adapter | Plan
    alpha: float | dict[str, float] | None = None
    warnings: tuple[str, ...] = ()
    file_modules: int = 0  # of which `modules` have a place in the model
    plan_seconds: float = 0.0  # to read it, and to find the place of each tensor

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in the record of an image."""
        hashes = hashes_of(self.path) if is_file(self.path) else None
        return {
            "name": self.name, "te": self.te, "unet": self.unet, "in_prompt": self.in_prompt,
            "modules": self.modules, "tensors": self.tensors,
            "sha256": hashes.sha256 if hashes else None, "autov2": hashes.autov2 if hashes else None,
            "autov3": hashes.autov3 if hashes else None,
        }  # fmt: skip


def apply_loras(
    model: Model,
    finder: LoraFinder,
    choices: Iterable[LoraChoice],
    tagged: Iterable[LoraChoice] = (),
    on_mismatch: OnMismatch = "error",
) -> tuple[list[AppliedLora], list[str]]:
    """Return the LoRAs of a request, those ``tagged`` in its prompts last, and why the others cannot be used."""
    applied: list[AppliedLora] = []
    wrong: list[str] = []
    for choice, in_prompt in [*((each, False) for each in choices), *((each, True) for each in tagged)]:
        try:
            applied.append(_apply(model, finder, choice, in_prompt, on_mismatch))
        except InweaveError as error:
            wrong.append(str(error))
    return applied, wrong


def _apply(
    model: Model, finder: LoraFinder, choice: LoraChoice, in_prompt: bool, on_mismatch: OnMismatch
) -> AppliedLora:
    started = time.perf_counter()
    path = finder.find(choice)
    source = adapter_of(choice, path)
    plan = _fit(model, path, source, on_mismatch)
    name = choice.name if in_prompt and choice.name else path.stem if is_file(path) else path.name
    strengths, report = choice.strengths(), plan.report
    warnings = [f"LoRA {name}: {warning}" for warning in report.warnings]
    if not report.clean:
        partial = f"LoRA {name}: only {report.placed} of {report.tensors} tensors have a place and were used"
        warnings.insert(0, partial)
    return AppliedLora(
        name, path, strengths["te"], strengths["unet"], in_prompt, report.modules, report.placed,
        source if report.clean else plan, choice.alpha, tuple(warnings), report.file_modules,
        time.perf_counter() - started,
    )  # fmt: skip


def _fit(model: Model, path: Path, source: Path | Adapter, on_mismatch: OnMismatch) -> Plan:
    """Return what the adapter changes in the model; the error for an adapter of another base names that base."""
    try:
        return model.plan(source)
    except TargetError as error:
        if on_mismatch == "warn" and (partial := model.plan(source, strict=False)).placements:
            return partial
        made_for = detect(load(path)).base
        mine = model.blueprint.variant.name if model.blueprint.variant else model.name
        hint = f"LoRA {path.name}: made for {made_for}, this model is {mine}: " if made_for else f"LoRA {path.name}: "
        raise TargetError(hint + str(error).splitlines()[0]) from None
    except FormatError as error:
        raise FormatError(f"LoRA {error}") from None


def stack_of(loras: Iterable[AppliedLora]) -> list[tuple[Path | Adapter | Plan, Strength]]:
    """Return the adapters with their strengths, as the weaver takes them."""
    return [(lora.source, strength_of(lora)) for lora in loras]


def strength_of(lora: AppliedLora) -> Strength:
    """Return the strengths of a LoRA for the denoiser and the text encoders."""
    return Strength(components={"unet": lora.unet, "te": lora.te})


def stack_key(loras: Iterable[AppliedLora]) -> tuple[object, ...]:
    """Return what two requests with the same stack have in common; a stack is a set."""
    rows = (
        (str(lora.path), lora.te, lora.unet, repr(lora.alpha), isinstance(lora.source, Plan) and id(lora.source))
        for lora in loras
    )
    return tuple(sorted(rows))


def rounding_note(losses: Mapping[str, float]) -> str:
    """Return how much of the LoRAs' change quantized weights could not hold; "" if they hold most of it."""
    mean = sum(losses.values()) / max(len(losses), 1)
    if mean < NOTED_LOSS:
        return ""
    return (
        f"{min(mean, 1):.0%} of what the LoRAs change is lost on average in {len(losses)} quantized weights; a "
        "format with more bits, or a LoRA trained with qat, keeps more"
    )
