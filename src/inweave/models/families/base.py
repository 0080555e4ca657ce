"""A model family: everything that generating and training need to know about it, in one object.

A family is a subclass of `Family` with one instance: in one file of this package, listed in `inweave.models.families`,
or in another package, which declares it as an entry point of the group `inweave.families`. Code outside of a family
never branches on its name; it asks the family.

    declared as data                                computed by methods
    networks, tokenizers    folders and classes     recognizes    is this denoiser one of mine?
    variants                published models        identify      which variant is this single file?
    flow, latent_patch      objective, sizes        tokenize      weighted text -> token ids
    steps, guidance         generating              encode        token ids -> text conditioning, with gradients
    presets, timesteps      training                batch_inputs  + sizes of the images -> the denoiser's arguments
    attention, feed_forward LoRA targets            denoise       one call of the denoiser, in the shape of the latents

Contract
- Files of this package import torch only inside methods, so that configurations are read without it.
- Latents are (batch, channels, height, width) everywhere. A family that packs patches or adds a frame axis does so
  inside `denoise` and undoes it there.
- Times are those of the scheduler, 0 to 1000, also for flows; `denoise` rescales or reverses them. It returns the
  prediction that the scheduler and the objective expect: noise, velocity, or for a flow noise minus image.
- Token ids go by the folder of their encoder, with the batch as the first axis; a family may add tensors such as a mask
  under "<folder>.<name>". Rows of a batch have one length: texts are padded to a number of chunks, the unit
  the family pads by. If a denoiser takes texts of different lengths, the family adds a mask to the padded states and
  truncates them inside `denoise`.
- Text encoders are either trainable, and then run inside the training step, or frozen: the states of a frozen one are
  computed once (`frozen_states`) and replace its token ids in `encode`.
- An edit model reads up to `most_references` images besides its prompt, as latents among the tensors of the text
  (`inweave.models.families.references`); `batch_inputs` takes them from there.
- Predictions of prompts are guided and composed, and images joined, in `inweave.models.families.conditioning`.
- Return values depend only on the arguments and the weights; a family has no state.
- A family of another package may bring classes of its own (`Network.library`), and for single files the configurations
  of its variants (`Family.package`). Such files use the tensor names of the network's class (`table = "own"`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from inweave.errors import FormatError
from inweave.models.families.conditioning import Conditioning as Conditioning
from inweave.models.families.conditioning import ConditioningRequest as ConditioningRequest
from inweave.models.families.conditioning import Pieces as Pieces
from inweave.models.families.declared import Network as Network
from inweave.models.families.declared import Variant as Variant
from inweave.models.families.references import ReferenceFit, Size, of_area, reference_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from inweave.models.vae import LatentSpace

Shape = tuple[int, ...]
Tensors = dict[str, "Tensor"]

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")

#: the training preset for images unless a family has a reason to differ
IMAGE_PRESET: Mapping[str, Any] = {
    "rank": 16, "learning_rate": 1e-4, "precision": "bf16", "max_grad_norm": 1.0, "targets": "attention-mlp",
    "steps": 2000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """One text as token ids and weights of the same shape, by the folder of the encoder."""

    ids: Tensors
    weights: Tensors
    chunks: int
    warnings: tuple[str, ...] = ()


class BlueprintView(Protocol):
    """The members of `inweave.models.blueprint.Blueprint` that a family uses."""

    @property
    def variant(self) -> Variant | None: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def denoiser_config(self) -> Mapping[str, Any]: ...


class ModelView(Protocol):
    """The members of `inweave.models.model.Model` that a family uses."""

    @property
    def blueprint(self) -> BlueprintView: ...

    @property
    def networks(self) -> Mapping[str, Any]: ...

    @property
    def tokenizers(self) -> Mapping[str, Any]: ...

    @property
    def denoiser(self) -> Any: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def latent_space(self) -> LatentSpace: ...


class Family(ABC):
    """One family of diffusion models; see the contract in the module's docstring."""

    name: ClassVar[str]
    networks: ClassVar[tuple[Network, ...]]
    tokenizers: ClassVar[tuple[str, ...]]  # classes of transformers that a folder may name
    variants: ClassVar[tuple[Variant, ...]] = ()
    #: the package whose folder `configs` describes the variants (`inweave.models.bundled`)
    package: ClassVar[str] = "inweave.models"

    #: the name table of `inweave.targets` its denoiser is listed in, and the tensors to look for in a single file
    table: ClassVar[str]
    single_file: ClassVar[str]
    #: of a family that `inweave.targets` does not list: base -> names and shapes of its denoiser's tensors, in the
    #: spelling of `inweave.targets.compact`, so that its adapters are detected and checked without the model
    listings: ClassVar[Mapping[str, Mapping[str, Sequence[int]]]] = {}

    flow: ClassVar[bool] = False  # trained by flow matching
    even_sigmas: ClassVar[bool] = False  # sampled at evenly spaced noise levels instead of the trained timesteps
    latent_patch: ClassVar[int] = 1  # latents per side that the denoiser sees as one token
    masked_inputs: ClassVar[bool] = False  # whether an inpainting variant takes mask and masked image as channels

    references: ClassVar[int] = 0  # reference images at most, of all variants that name no number of their own
    needs_reference: ClassVar[bool] = False  # whether it can do nothing without one
    sees_references: ClassVar[bool] = False  # whether a text encoder sees them too
    reference_area: ClassVar[int] = 1024 * 1024  # pixels of a reference

    steps: ClassVar[int]  # for generating, where no variant is known
    guidance: ClassVar[float]

    trainable_encoders: ClassVar[tuple[str, ...]] = ()
    frozen_encoders: ClassVar[tuple[str, ...]] = ()

    presets: ClassVar[Mapping[str, Mapping[str, Any]]]  # training settings that differ from the defaults
    timesteps: ClassVar[str] = "uniform"  # how training samples them where neither user nor preset says
    #: seconds that compiled blocks save per example of the model's own size, in a step that is recorded, on one H200;
    #: 0: nothing, or nothing that was measured (see `inweave.training.execution.compilation`)
    compile_saving: ClassVar[float] = 0.0
    long_text: ClassVar[int] = 3  # chunks of a caption beyond which padding the others of its batch costs time
    masks_padding: ClassVar[bool] = False  # whether a mask hides padding from the denoiser
    attention: ClassVar[tuple[str, ...]]  # regular expressions for the ends of module names
    feed_forward: ClassVar[tuple[str, ...]]

    #: words in the names of models that have the same networks and are called otherwise -> what they are
    relatives: ClassVar[Mapping[str, str]] = {}

    pipeline: ClassVar[str]  # diffusers' class for text to image
    inpaint_pipeline: ClassVar[str] = ""
    #: whether the pipeline itself makes images (`generate`), and not the loop of `inweave.generate.denoise`
    own_pipeline: ClassVar[bool] = False
    index_options: ClassVar[Mapping[str, Any]] = {}  # what else its model_index.json says
    inpaint_index_options: ClassVar[Mapping[str, Any]] = {}

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of one of the family's networks in the order in which they run."""
        from inweave.weights.streaming.stream import listed_blocks

        return listed_blocks(network)

    def image_tokens(self, latents: tuple[int, ...]) -> int:
        """Return the number of image tokens in the denoiser for latents of this shape."""
        return latents[2] * latents[3] // self.latent_patch**2

    def size_problem(self, model: ModelView, size: tuple[int, int], *, image: bool = False) -> str:
        """Return why the denoiser, or with ``image`` its pipeline, cannot make images of a size; "" if it can."""
        return ""

    # references

    def most_references(self, blueprint: BlueprintView) -> int:
        """Return how many reference images a model reads at most; 0 if it is not an edit model."""
        variant = blueprint.variant
        return self.references if variant is None or variant.references is None else variant.references

    def reference_fit(self, model: ModelView, size: Size, area: int | None = None) -> ReferenceFit:
        """Return how an image of a size becomes a reference of at most about ``area`` pixels."""
        step = model.latent_space.scale * self.latent_patch
        fitted = of_area(size, area or self.reference_area, step)
        return ReferenceFit(fitted, fitted)

    def reference_problem(self, size: Size) -> str:
        """Return why an image of a size cannot be a reference; "" if it can."""
        return ""

    def seen_text(self, model: ModelView, pieces: Pieces, sizes: Sequence[Size]) -> Pieces:
        """Return a text with marks for references of these sizes, where a text encoder sees them."""
        return pieces

    def seen_images(self, model: ModelView, images: Sequence[Any]) -> Tensors:
        """Return what a text encoder sees of references, PIL's images, as tensors beside the token ids."""
        return {}

    def edit_size(self, model: ModelView, references: Sequence[Size]) -> Size:
        """Return the size of an image that is made from references of these sizes, where a request names none."""
        return self.reference_fit(model, references[0]).size

    # which model this is

    @abstractmethod
    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        """Return whether a denoiser of this class and configuration belongs to the family."""

    @abstractmethod
    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        """Identify the denoiser of a single file by the names and shapes of its tensors, which have no prefix.

        Returns:
            The name of the variant and the evidence for it; None for a model of another family with the same table.

        Raises:
            FormatError: no known model has these tensors.
        """

    def refine(
        self, variant: Variant, tensors: Mapping[str, Shape], metadata: Mapping[str, str]
    ) -> tuple[Variant, list[str]]:
        """Return the variant that the file's metadata names among those with the same tensors, and the evidence."""
        for other in (each for each in self.variants if each.mark and each.base == variant.name):
            for key in ("modelspec.architecture", "modelspec.title"):
                if other.mark in metadata.get(key, "").lower():
                    return other, [f"{key} is {metadata[key]!r}: {other.name}"]
            return variant, [f"{other.name} has the same tensors and no metadata names it: {variant.name} is assumed"]
        return variant, []

    def refuse_relative(self, *names: object) -> None:
        """Raise FormatError if a word of a name, of a pipeline or a file, is that of a relative."""
        for name in filter(None, map(str, names)):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
            if word := next((each for each in self.relatives if each in words), None):
                raise FormatError(f"{name[:80]!r} is {self.relatives[word]}")

    def variant(self, name: str) -> Variant:
        """Return the variant of this name."""
        return next(each for each in self.variants if each.name == name)

    def preset_name(self, blueprint: BlueprintView) -> str:
        """Return the name of the preset for a model."""
        variant = blueprint.variant
        return variant.name if variant is not None and variant.name in self.presets else self.name

    @abstractmethod
    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        """Return (ss_base_model_version, modelspec.architecture) for adapters trained on a model of the family."""

    def index_settings(self, variant: Variant) -> Mapping[str, Any]:
        """Return what the model_index.json of a variant says besides its parts."""
        return {**self.index_options, **(self.inpaint_index_options if variant.inpaint else {})}

    def mu(self, tokens: int, steps: int) -> float | None:
        """Return the shift of a flow's noise levels that depends on the size of the image; None: the schedule's."""
        return None

    def complete(self, folder: str, network: nn.Module) -> None:  # noqa: B027 - most have nothing to add
        """Compute the attributes of a network besides parameters and buffers; it was built on the meta device."""

    # text

    @abstractmethod
    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        """Return the token ids of one text, padded to at least ``chunks``; CLIP reads at most ``limit`` tokens."""

    def text_lengths(self, model: ModelView, texts: Sequence[str], limit: int) -> list[tuple[int, bool]]:
        """Return (chunks, whether its end is not read) of each text, as `tokenize` would."""
        tokens = (self.tokenize(model, ((text, 1.0),), None, limit) for text in texts)
        return [(each.chunks, bool(each.warnings)) for each in tokens]  # only the length of a plain text is warned of

    @abstractmethod
    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        """Return the text conditioning of a batch, with gradients where they are enabled.

        ``ids`` go by encoder; `frozen_states` may replace those of a frozen one. ``weights``: those of `tokenize`.
        """

    def frozen_states(self, model: ModelView, ids: Tensors) -> Tensors:
        """Return the states of the frozen encoders for a batch of token ids, by the encoder's folder."""
        return {}

    @abstractmethod
    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        """Return empty inputs for `encode` of one text of this length; states in place of a frozen encoder's ids."""

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        """Return a warning for each setting of a request that has no effect on this model."""
        return []

    def negative_text(self, model: ModelView, request: ConditioningRequest, negative: Tensors) -> Tensors:
        """Return the conditioning of the negative prompt; ``negative`` is its encoded text."""
        return negative

    # the denoiser

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        """Return all arguments of the denoiser for a batch.

        ``sizes`` has one row per image: height and width of the original, top and left of the crop, height and width of
        the result; ``latents`` is the shape of the latents; ``guidance`` is for denoisers that take it as an input.
        """
        return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in text.items()}

    @abstractmethod
    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return one prediction in the shape of the latents, without guidance, from the inputs of `batch_inputs`."""

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        """Return whether this guidance needs a prediction for the negative prompt."""
        return guidance > 1.0

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """Combine two predictions by classifier-free guidance."""
        return negative + guidance * (positive - negative)

    # shared by all families

    def token_ids(self, model: ModelView, text: str, chunks: int | None = None, limit: int | None = None) -> Tensors:
        """Return the token ids of a plain text, for `encode`."""
        return self.tokenize(model, ((text, 1.0),) if text else (), chunks, limit).ids

    def pad_text(self, text: Tensors, chunks: int) -> Tensors:
        """Pad the encoded text of rows to ``chunks``; only families with `masks_padding` do, others pad token ids."""
        return text

    def join_text(self, rows: Sequence[Tensors]) -> Tensors:
        """Return the encoded texts of rows as one batch."""
        import torch

        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def generate(
        self, model: ModelView, conditioning: Conditioning, size: tuple[int, int], steps: int, seed: int, on_step: Any
    ) -> Any:
        """Return the image that the pipeline makes, where it makes them; ``on_step`` gets (step, latents or None)."""
        raise NotImplementedError

    def frozen_folders(self, model: ModelView) -> list[str]:
        """Return the frozen encoders that this model has."""
        return [folder for folder in self.frozen_encoders if folder in model.networks]

    def condition(self, model: ModelView, request: ConditioningRequest) -> Conditioning:
        """Encode the prompts of an image."""
        import torch

        guided = self.is_guided(model, request.guidance)
        prompts = (request.positive, *(pieces for pieces, _ in request.others))
        shapes = [each.image.size for each in request.references]
        prompts = tuple(self.seen_text(model, pieces, shapes) for pieces in prompts)
        seen = self.seen_images(model, [each.image for each in request.references])
        positives = [self.tokenize(model, pieces) for pieces in prompts]
        warnings = [*self.prompt_warnings(model, request), *(line for each in positives for line in each.warnings)]
        with torch.no_grad():
            if guided:  # all with as many chunks
                longest = max(each.chunks for each in positives)
                negative = self.tokenize(model, self.seen_text(model, request.negative, shapes), longest)
                longest = max(longest, negative.chunks)
                positives = [self.tokenize(model, pieces, longest) for pieces in prompts]
                warnings += negative.warnings
                below = self.encode(model, on_encoders(model, negative.ids | seen), request.clip_skip, negative.weights)
            texts = [
                self.encode(model, on_encoders(model, each.ids | seen), request.clip_skip, each.weights)
                for each in positives
            ]
            if guided:
                texts.insert(0, self.negative_text(model, request, below))
            text = {name: torch.cat([each[name] for each in texts]) for name in texts[-1]} if guided else texts[0]
            rows = next(iter(text.values()))
            references = [each.latents.to(rows.device, model.dtype) for each in request.references]
            text |= reference_tensors([each.expand(len(rows), -1, -1, -1) for each in references])
            size = (request.height, request.width)
            sizes = torch.tensor([[*size, 0, 0, *size]], dtype=model.dtype, device=rows.device).repeat(len(rows), 1)
            latents = model.latent_space.shape(request.width, request.height)
            inputs = self.batch_inputs(model, text, sizes, latents, request.guidance)
        weights = (request.weight, *(weight for _, weight in request.others))
        weights = () if weights == (1.0,) else weights
        return Conditioning(inputs, request.guidance, guided, tuple(warnings), weights, text, sizes)


def on_encoders(model: ModelView, ids: Tensors) -> Tensors:
    """Return token ids on the device of their encoder."""
    return {name: value.to(device_of(model.networks[name.partition(".")[0]])) for name, value in ids.items()}


def device_of(network: Any) -> torch.device:
    device: torch.device = network.device
    return device
