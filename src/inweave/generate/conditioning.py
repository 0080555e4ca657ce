"""The conditioning of every step: the prompts of a request, encoded once for each text that occurs.

A prompt that stays the same is encoded before the first step; one that changes (`inweave.generate.prompt_edits`) when a
step needs another text. Steps are those that are made: image to image at a strength of 0.5 makes half of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from PIL import Image

from inweave.adapter.components import FOLDERS
from inweave.errors import Problem
from inweave.generate.config import GenerateConfig
from inweave.generate.encoded import encoded_prompts
from inweave.generate.images import fit_reference, to_tensor
from inweave.generate.prompt import ParsedPrompt, Pieces
from inweave.models import embedded, vae
from inweave.models.configuration import library_errors
from inweave.models.embedded_words import read_pieces
from inweave.models.families.conditioning import Conditioning, ConditioningRequest, join
from inweave.models.families.references import Reference
from inweave.models.model import Model
from inweave.models.sd.steady import steady
from inweave.weights.layer_slots import RowCount
from inweave.weights.stack import Strength

#: adapters in slots (`inweave.weights.row_adapters`) that are added to what is merged, for one image
Added = tuple[tuple[int, Strength], ...]
#: the texts of one step: positive ones with their weights, and the negative one
Texts = tuple[tuple[tuple[Pieces, float], ...], Pieces]


@contextmanager
def network_errors(model: Model) -> Iterator[None]:
    """Turn an exception inside a network into `FormatError`: its parts or their configurations do not match."""
    with library_errors(f"{model.name}: its networks cannot be run together; a configuration of it is wrong"):
        yield


class PromptConditioning:
    """The conditioning of any step; ``warnings`` are about the texts that were encoded so far.

    ``added``: adapters of the image, for its texts too. ``complete``: whether every layer of the encoders that they
    change was called; otherwise the texts were encoded without a part of them.
    """

    def __init__(
        self,
        model: Model,
        prompts: tuple[ParsedPrompt, ParsedPrompt],
        guidance: float,
        size: tuple[int, int],
        clip_skip: int | None,
        added: Added = (),
        references: Sequence[Image.Image] = (),
    ) -> None:
        self.model, self.added, self.complete = model, added, True
        self.references = tuple(map(self._reference, references))
        self.positive, self.negative = prompts
        self.guidance, self.size, self.clip_skip = guidance, size, clip_skip
        self.warnings: list[str] = []
        self._encoded: dict[Texts, Conditioning] = {}
        if self.positive.composition is None and self.negative.composition is None:
            self.at(0, 1)

    def at(self, step: int, steps: int) -> Conditioning:
        """Return the conditioning of step ``step``, counted from 0, of ``steps``."""
        ((negative, _),) = self.negative.at(step, steps)
        texts = self.positive.at(step, steps), negative
        if texts not in self._encoded:
            self._encoded[texts] = self._encode(*texts)
        return self._encoded[texts]

    def _encode(self, positives: tuple[tuple[Pieces, float], ...], negative: Pieces) -> Conditioning:
        if self.model.name == embedded.NAME:
            positives = tuple((self._spelled(pieces), weight) for pieces, weight in positives)
            negative = self._spelled(negative)
        (first, weight), *others = positives
        request = ConditioningRequest(
            first, negative, self.guidance, *self.size, self.clip_skip, weight, tuple(others), self.references
        )

        def encode() -> Conditioning:
            encoders = self.model.networks.keys() - {"vae", self.model.blueprint.denoiser.folder}
            with network_errors(self.model), self.model.using(*encoders), self._acting(encoders):
                return self.model.family.condition(self.model, request)

        conditioning = encode() if self.added else encoded_prompts(self.model).get(self.model, request, encode)
        self.warnings += conditioning.warnings
        return conditioning

    @torch.no_grad()
    def _reference(self, image: Image.Image) -> Reference:
        """Encode a reference image at the size that its model reads it at."""
        fitted = fit_reference(image, self.model.family.reference_fit(self.model, image.size))
        pixels = to_tensor(fitted, fitted.size)
        with network_errors(self.model), self.model.using("vae"):
            return Reference(vae.encode(self.model.vae, pixels, None).to(self.model.dtype), image)

    @contextmanager
    def _acting(self, folders: Iterable[str]) -> Iterator[None]:
        """Let these encoders add the image's adapters, to all rows."""
        with ExitStack() as active:
            acting = dict[str, list[int]]()
            for component in sorted(FOLDERS[folder] for folder in folders if self.added and folder in FOLDERS):
                own = at_component(self.added, component)
                acting[component] = [slot for slot, _ in own]
                active.enter_context(self.model.row_adapters.acting(component, acting[component])).fill_all(own)
            yield
        for component, slots in acting.items():
            self.complete &= not self.model.row_adapters.refuse_uncalled(component, slots)

    def _spelled(self, pieces: Pieces) -> Pieces:
        spelled, notes = read_pieces(pieces)
        self.warnings += notes
        return spelled


class BatchConditioning:
    """The conditioning of images that are made together: at each step in as few groups as their texts allow."""

    def __init__(self, model: Model, images: Sequence[PromptConditioning], latents: tuple[int, ...]) -> None:
        self.model, self.images, self._latents = model, images, latents
        self._groups: dict[tuple[int, ...], list[tuple[list[int], Conditioning]]] = {}
        component = FOLDERS[model.blueprint.denoiser.folder]
        self._added = [at_component(image.added, component) for image in images]
        self._component = component
        self._rows: RowCount | None = None

    def at(self, places: Sequence[tuple[int, int]]) -> list[tuple[list[int], Conditioning]]:
        """Return groups of images, each with its conditioning; ``places``: (step, steps) of each, counted from 0."""
        each = [image.at(*place) for image, place in zip(self.images, places, strict=True)]
        key = tuple(map(id, each))  # they live as long as their image
        if key not in self._groups:
            numbers: dict[tuple[object, ...], list[int]] = {}
            for number, conditioning in enumerate(each):
                numbers.setdefault(conditioning.layout(self.model.family), []).append(number)
            self._groups[key] = [(group, self._join([each[number] for number in group])) for group in numbers.values()]
        return self._groups[key]

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let the denoiser add the adapters of each image inside the block; its weights may not change meanwhile."""
        slots = {slot for own in self._added for slot, _ in own}
        with ExitStack() as active:
            if slots:
                self._rows = active.enter_context(self.model.row_adapters.acting(self._component, slots))
            if self.model.recorded is None:  # which knows modules by their classes
                active.enter_context(steady(self.model.denoiser))  # last: hooks are known now
            yield

    def fill(self, numbers: Sequence[int], conditioning: Conditioning) -> None:
        """Set the adapters of the denoiser's rows for these images, which the next call predicts."""
        if self._rows is not None:
            self._rows.fill([self._added[number] for number in numbers for _ in range(conditioning.rows)])

    def _join(self, images: list[Conditioning]) -> Conditioning:
        if len(images) == 1:
            return images[0]
        with network_errors(self.model):
            return join(self.model.family, self.model, images, self._latents)


def at_component(added: Added, component: str) -> list[tuple[int, float]]:
    """Return the slots that change a component, with their strengths there."""
    pairs = [(slot, strength.in_component(component)) for slot, strength in added]
    return [(slot, strength) for slot, strength in pairs if strength != 0.0]


def composition_problem(model: Model, guidance: float) -> Problem:
    """Return why the prompts that AND joins cannot be composed by this model at this guidance."""
    family, variant = model.family, model.blueprint.variant
    least = next((number for number in (0, 1) if family.is_guided(model, number + 0.5)), None)
    name = variant.name if variant else family.name
    reason = (
        f"classifier-free guidance, which starts above {least} (it is {guidance:g})"
        if least is not None
        else f"classifier-free guidance, which {name} does not have"
    )
    return Problem("prompt", f"prompts that AND joins are composed by {reason}; write one prompt without AND")


def pipeline_problems(pipeline: str, config: GenerateConfig, image: Image.Image | None) -> list[Problem]:
    """Return what a request asks for that a model which is run by its own pipeline cannot do."""
    features = {
        "init": image is not None, "sampler": config.sampler is not None, "schedule": config.schedule != "simple",
        "prompt": any(each.composition is not None or each.composed for each in config.prompts),
    }  # fmt: skip
    reason = f"{pipeline} makes the images of this model, from a plain prompt and with its own sampler; leave it out"
    return [Problem(name, reason) for name, present in features.items() if present]
