"""A family that was derived from a pipeline: it trains by the derived call, and generates by running the pipeline.

    encode          run the pipeline on a caption up to the first call of the denoiser; keep what depends on the text
    batch_inputs    rows joined as the pipeline joins them, and the strength of guidance
    denoise         the derived call; what depends on the size is recorded once for each size
    generate        the pipeline itself, with the live networks: guidance, steps and decoding are its own

Token ids are the bytes of the caption: the pipeline does everything from the text on. Its text encoders are frozen.
Sizes are recorded with placeholders for the text encoders that repeat one recorded answer, so no weights are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import ConfigError
from inweave.models.families.base import (
    IMAGE_PRESET,
    Conditioning,
    ConditioningRequest,
    Family,
    ModelView,
    Network,
    Pieces,
    PromptTokens,
    Shape,
    Tensors,
    Variant,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inweave.models.derived.call import Derivation
    from inweave.models.derived.recording import Shapes

FLOW, NOISE = "pipeline-flow", "pipeline-noise"
#: what to train where no layer has a name that is known for attention: all layers of the blocks, or all of them
_TARGETS: Mapping[str, Any] = {"": "attention-mlp", "-blocks": "all", "-layers": (".*",)}
#: the presets of all derived families: what is known of a model that nobody tried
PRESETS: Mapping[str, Mapping[str, Any]] = {
    f"{name}{names}": {**IMAGE_PRESET, "resolution": 1024, **own, "dialect": "diffusers", "targets": targets}
    for name, own in ((FLOW, {"guidance": 1.0}), (NOISE, {}))
    for names, targets in _TARGETS.items()
}
TEXT, NEGATIVE = "prompt", "negative_prompt"


class DerivedFamily(Family):
    """One pipeline; see the docstring of the module.

    Args:
        derivation: how the denoiser is called.
        recorder: the pipeline with placeholders, and the shapes of the denoiser's output.
        build: a function that makes the pipeline of live networks, with a strength for its guiders.
        strength: that of guidance where a guider has it; None: the pipeline's call has it.
    """

    table = "own"
    single_file = ""
    variants = ()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    attention = ()
    feed_forward = ()

    def __init__(
        self,
        derivation: Derivation,
        recorder: tuple[Any, Shapes],
        networks: Sequence[Network],
        build: Callable[[ModelView, torch.device, float | None], Any],
        strength: float | None = None,
    ) -> None:
        import inspect

        from inweave.models.derived.recording import denoiser_folder, guidance_option

        self.derivation, self._build = derivation, build
        self._recorder, self._shapes = recorder
        self._sized: dict[tuple[int, int], dict[str, Any]] = {}
        self._made: dict[tuple[int, int], tuple[int, int]] = {}  # by the pipeline, where it is asked for a size
        every: Any = vars(self)  # what other families declare in their class
        known = inspect.signature(self._recorder.__call__).parameters
        self._option = option = guidance_option(known)
        guidance = strength if strength is not None else known[option].default if option is not None else 0.0
        steps = known["num_inference_steps"].default
        denoiser = denoiser_folder(self._recorder)
        frozen = tuple(each.folder for each in networks if each.folder not in (denoiser, "vae"))
        self._reader = (*frozen, denoiser)[0]  # the network whose input captions go by
        every |= {
            "name": derivation.pipeline.removesuffix("Pipeline"), "pipeline": derivation.pipeline,
            "networks": tuple(networks), "tokenizers": (), "flow": derivation.prediction == "flow",
            "frozen_encoders": frozen, "latent_patch": derivation.patch,
            "steps": steps if isinstance(steps, int) else 28,
            "guidance": float(guidance or 0.0), "timesteps": "shift" if derivation.prediction == "flow" else "uniform",
        }  # fmt: skip

    own_pipeline = True
    masks_padding = True  # rows of any length are joined as the pipeline does it

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return False  # it belongs to one folder

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        return None

    def preset_name(self, blueprint: Any) -> str:
        from inweave.models.roles import attention_names, block_layers

        tensors = blueprint.denoiser.source.names()
        modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        known = any(attention_names().fullmatch(module) for module in modules)
        names = "" if known else "-blocks" if any(map(block_layers().fullmatch, modules)) else "-layers"
        return f"{FLOW if self.flow else NOISE}{names}"

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return self.name, self.name

    # text

    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        from inweave.models.encode import BREAK

        text = " ".join(piece for piece, _ in pieces if piece != BREAK)
        weighted = any(weight != 1.0 for _, weight in pieces)
        warnings = (f"{self.name} is run by its own pipeline; weights in the prompt were ignored",) if weighted else ()
        return PromptTokens({self._reader: _bytes(text)}, {}, 1, warnings)

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        from inweave.models.derived.call import text_values
        from inweave.models.derived.recording import record

        encoder = self._reader
        if encoder not in ids:
            return dict(ids)  # of `example_ids`
        device = model.networks[encoder].device
        pipe = self._build(model, device, None)
        (row,) = ids[encoder]
        recording = record(
            pipe, self._shapes, [_text(row)], self.derivation.reference, self.derivation.strength, calls=1
        )
        return text_values(self.derivation, recording)

    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        from inweave.models.derived.call import text_values

        values = text_values(self.derivation, self._record(*self.derivation.reference))
        return {
            name: value.to(device, model.dtype if value.is_floating_point() else None) for name, value in values.items()
        }

    def join_text(self, rows: Sequence[Tensors]) -> Tensors:
        import torch

        from inweave.models.derived.arguments import padded

        texts: Tensors = {}
        for name, argument in self.derivation.arguments.items():
            if argument.kind == "text":
                values = [row[name] for row in rows]
                argument.check_lengths(name, values)
                texts[name] = torch.cat(padded(values, argument.side, argument.fill))
                if values[0].dim() > 1:
                    texts[f"{name}#length"] = torch.tensor([value.shape[1] for value in values])
        return texts

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        return [f"{self.name} is run by its own pipeline; clip_skip was ignored"] if request.clip_skip else []

    # the denoiser

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        import torch

        inputs = super().batch_inputs(model, text, sizes, latents, guidance)
        for name, argument in self.derivation.arguments.items():
            if argument.kind == "guidance":
                rows = latents[0] if argument.rows == "joined" else 1
                inputs[name] = torch.full((rows,), guidance * argument.value, device=sizes.device)
        return inputs

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        from inweave.models.derived.call import joined

        height, width = latents.shape[2:]
        if (height, width) not in self._sized:
            from inweave.models.derived.call import size_values

            scale = model.latent_space.scale
            size = width * scale, height * scale
            if problem := self.size_problem(model, size):
                raise ConfigError([problem])
            self._sized[height, width] = size_values(self.derivation, self._record(*size))
        rows = []
        for row in range(len(latents)):
            own: Tensors = {}
            for name, argument in self.derivation.arguments.items():
                if argument.kind == "text":
                    value = inputs[name][row : row + 1] if len(inputs[name]) == len(latents) else inputs[name][:1]
                    length = inputs.get(f"{name}#length")
                    if length is not None:
                        count = int(length[row])
                        value = value[:, :count] if argument.side == "right" else value[:, value.shape[1] - count :]
                    own[name] = value
            rows.append(own)
        values = joined(self.derivation, rows, 0.0)
        values |= {name: inputs[name] for name, each in self.derivation.arguments.items() if each.kind == "guidance"}
        return self.derivation.call(model.denoiser, latents, t, values, self._sized[height, width])

    # sizes

    def size_problem(self, model: ModelView, size: tuple[int, int], *, image: bool = False) -> str:
        if not self.derivation.chooses or (not image and not self._reads_size):
            return ""
        from inweave.models.derived.proof import TEXTS, made_size
        from inweave.models.derived.recording import record

        if size not in self._made:
            recording = record(self._recorder, self._shapes, TEXTS[:1], size, self.derivation.strength)
            self._made[size] = made_size(recording, model.latent_space)
        width, height = self._made[size]
        if (width, height) == size:
            return ""
        return f"{self.pipeline} makes {width}x{height} where {size[0]}x{size[1]} are asked for; use {width}x{height}"

    @property
    def _reads_size(self) -> bool:
        """Whether an argument of the denoiser depends on the size."""
        return any(each.kind == "size" or each.grows is not None for each in self.derivation.arguments.values())

    # generating

    def is_guided(self, model: ModelView, guidance: float) -> bool:
        return False  # nothing is composed here: the pipeline guides

    def condition(self, model: ModelView, request: ConditioningRequest) -> Conditioning:
        tokens = self.tokenize(model, request.positive)
        inputs = {TEXT: tokens.ids[self._reader]}
        inputs[NEGATIVE] = self.tokenize(model, request.negative).ids[self._reader]
        warnings = [*self.prompt_warnings(model, request), *tokens.warnings]
        if self._option == "true_cfg_scale" and request.guidance > 1 and not request.negative:
            warnings.append(
                f"{self.name} is guided by a negative prompt only; there is none, so guidance has no effect"
            )
        return Conditioning(inputs, request.guidance, False, tuple(warnings))

    def generate(
        self,
        model: ModelView,
        conditioning: Conditioning,
        size: tuple[int, int],
        steps: int,
        seed: int,
        on_step: Callable[[int, Tensor | None], None],
    ) -> Any:
        """Return the image of the pipeline for this request; ``on_step`` gets the number of a step, from 1."""
        import inspect

        import torch

        from inweave.models.derived.recording import OFF

        pipe = self._build(model, model.denoiser.device, conditioning.guidance)
        known = inspect.signature(pipe.__call__).parameters
        negative = _text(conditioning.inputs[NEGATIVE][0])
        settings: dict[str, Any] = {
            "prompt": _text(conditioning.inputs[TEXT][0]), "width": size[0], "height": size[1],
            "num_inference_steps": steps, "generator": torch.Generator().manual_seed(seed), "output_type": "pil",
        }  # fmt: skip
        settings |= {name: OFF[name] for name in ("use_resolution_binning",) if name in known}
        if self._option is not None:
            settings[self._option] = conditioning.guidance
        if negative:
            if NEGATIVE not in known:
                raise ConfigError([f"negative_prompt: {self.pipeline} has none; leave it out"])
            settings[NEGATIVE] = negative
        _observe(pipe.scheduler, lambda step, latents: on_step(step, self._image_latents(model, latents, size)))
        pipe.set_progress_bar_config(disable=True)
        with torch.no_grad():
            output = pipe(**settings)
        images = next(iter(output.values()))  # the first field of every pipeline's output
        return images[0] if isinstance(images, list) else images

    def _image_latents(self, model: ModelView, latents: Tensor, size: tuple[int, int]) -> Tensor | None:
        """Return latents of the pipeline as the autoencoder reads them; None: they have another shape."""
        shape = model.latent_space.shape(*size)[1:]
        own = list(latents.shape[1:])
        if own == self.derivation.layout.shape_of(shape):
            return self.derivation.layout.unpack(latents[:1], shape)
        return latents[:1] if own == list(shape) else None

    def _record(self, width: int, height: int) -> Any:
        from inweave.models.derived.proof import TEXTS
        from inweave.models.derived.recording import record

        return record(self._recorder, self._shapes, TEXTS[:1], (width, height), self.derivation.strength, calls=1)


def _observe(scheduler: Any, on_step: Callable[[int, Tensor], None]) -> None:
    """Call ``on_step`` after every step of a scheduler: callbacks of pipelines differ, and some have none."""
    advance, steps = scheduler.step, count(1)

    @wraps(advance)  # pipelines look at its parameters
    def step(*args: Any, **options: Any) -> Any:
        result = advance(*args, **options)
        on_step(next(steps), result[0])
        return result

    scheduler.step = step


def _bytes(text: str) -> Tensor:
    import torch

    return torch.tensor([list(text.encode())], dtype=torch.long)


def _text(row: Tensor) -> str:
    return bytes(row.tolist()).decode()
