"""A model that serves requests: text to image, image to image, inpainting, with any stack of LoRAs.

    pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
    image = pipe("a red apple", steps=20, seed=7).images[0]
    pipe.swap(["ink:1.0"])

A request is checked whole before any work starts: limits, sampler, LoRA files, whether each LoRA fits the model, input
images; everything that is wrong comes back in one error. LoRAs of a request (in its list or as tags in its prompt)
are woven in for it on top of the pipeline's own stack; the next request gets its own.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack, overload

import torch

from inweave.arguments import expect
from inweave.errors import ConfigError, Problem
from inweave.generate.applied import AppliedLora, OnMismatch, apply_loras, stack_of
from inweave.generate.batches import Batch, check_batch
from inweave.generate.conditioning import (
    Added,
    PromptConditioning,
    composition_problem,
    pipeline_problems,
)
from inweave.generate.config import GenerateConfig, LoraChoice, RequestSettings, parse_loras
from inweave.generate.denoise import Callbacks, Progress
from inweave.generate.drawing import Drawing, Job, OnImage
from inweave.generate.find import LoraFinder, adapter_of, parse_request
from inweave.generate.groups import draw_groups
from inweave.generate.images import ImageInput, size_warnings
from inweave.generate.inputs import open_inputs, open_references, size_for
from inweave.generate.loading import CACHE_GB, load_for_images
from inweave.generate.passes import Passes
from inweave.generate.prepared import PreparedRequest, record_of
from inweave.generate.repeat import model_hash
from inweave.generate.result import Result
from inweave.generate.running import RunningBatch
from inweave.generate.templates import PromptSources, configs_of
from inweave.generate.upscale import complete_pass
from inweave.generate.upscaler_files import UpscalerFinder
from inweave.models.acceleration import Graph
from inweave.models.model import Model, Quantize
from inweave.models.open import open_model
from inweave.models.residency import Offload
from inweave.models.samplers import own_sampler, problems
from inweave.ops.tensors.device import device_note
from inweave.weights.stack import Strength


class Pipeline:
    """A loaded model that generates images: `pipe("a red apple", seed=7).images[0]`.

    Use `pipeline` to make one. Safe to call from several threads; one request runs at a time.

    Args:
        model: the loaded model.
        loras: the stack that every request gets, below its own LoRAs.
        lora_folders: folders in which LoRAs are looked up by name or hash.
        finder: looks up LoRA files in place of ``lora_folders``.
        batch: how many images of a request are made together, at most: a number, or "auto".
        prompts: the wildcards and styles that prompts may name.
        upscalers: the upscalers that requests may name.
    """

    def __init__(
        self,
        model: Model,
        *,
        loras: Sequence[LoraChoice] = (),
        lora_folders: Iterable[str | os.PathLike[str]] = (),
        finder: LoraFinder | None = None,
        batch: Batch = "auto",
        prompts: PromptSources | None = None,
        upscalers: UpscalerFinder | None = None,
    ) -> None:
        self.model = model
        self.batch = check_batch(batch)
        self.prompts, self.upscalers = prompts or PromptSources(), upscalers or UpscalerFinder()
        self._measured: dict[tuple[object, ...], int] = {}
        self.finder = finder or LoraFinder(lora_folders)
        self.loras: tuple[LoraChoice, ...] = tuple(loras)
        self._lock = threading.RLock()

    @cached_property
    def _model_hash(self) -> str | None:
        return model_hash(self.model.blueprint)

    def swap(self, loras: Iterable[str | LoraChoice | Mapping[str, Any]]) -> int:
        """Replace the stack for the requests that follow.

        Args:
            loras: files or names with strengths, "style.safetensors:0.8".

        Returns:
            How many tensors were written.

        Raises:
            ConfigError: one problem for each LoRA that is missing, unreadable, or does not fit the model.
        """
        choices = parse_loras(loras)
        with self._lock:
            applied, wrong = apply_loras(self.model, self.finder, choices)
            if wrong:
                raise ConfigError(wrong)
            written = self.model.swap(stack_of(applied))
            self.loras = choices
            return written

    @overload
    def __call__(
        self, prompt: str | GenerateConfig = ..., *, init: ImageInput | None = ..., mask: ImageInput | None = ...,
        progress: Callable[[Progress], object] | None = ..., preview_every: int = ..., preview_first: bool = ...,
        cancelled: Callable[[], bool] | None = ..., on_image: OnImage | None = ..., on_mismatch: OnMismatch = ...,
        finder: LoraFinder | None = ..., batch: Batch | None = ..., references: Sequence[ImageInput] | None = ...,
        **settings: Unpack[RequestSettings],
    ) -> Result: ...  # fmt: skip

    @overload
    def __call__(
        self, prompt: Sequence[GenerateConfig], *, init: ImageInput | None = ..., mask: ImageInput | None = ...,
        progress: Callable[[Progress], object] | None = ..., preview_every: int = ..., preview_first: bool = ...,
        cancelled: Callable[[], bool] | None = ..., on_image: OnImage | None = ..., on_mismatch: OnMismatch = ...,
        finder: LoraFinder | None = ..., batch: Batch | None = ..., references: Sequence[ImageInput] | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    def __call__(
        self,
        prompt: str | GenerateConfig | Sequence[GenerateConfig] = "",
        *,
        init: ImageInput | None = None,
        mask: ImageInput | None = None,
        progress: Callable[[Progress], object] | None = None,
        preview_every: int = 0,
        preview_first: bool = False,
        cancelled: Callable[[], bool] | None = None,
        on_image: OnImage | None = None,
        on_mismatch: OnMismatch = "error",
        finder: LoraFinder | None = None,
        batch: Batch | None = None,
        references: Sequence[ImageInput] | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Result | list[Result]:
        """Generate images for one request, or for several.

        Args:
            prompt: the text, a complete `GenerateConfig`, or a list of them, whose images share batches where they can.
            init: an image to start from (image to image), as a path or a PIL image; of a list for all requests.
            mask: white where to repaint (inpainting), as a path or a PIL image; of a list for all requests.
            progress: called after each step.
            preview_every: add a preview image to the progress every this many steps; 0 for none.
            preview_first: make previews from the first step on, and one of the last step.
            cancelled: called before each step; true cancels the request.
            on_image: called with (number, image, record) after each image; those of a list are numbered through.
            on_mismatch: "warn" uses the part of a LoRA that fits, and names the rest in the warnings of the result.
            finder: looks up the LoRAs of this request instead of the pipeline's own finder.
            batch: how many images are made together, at most: a number, or "auto"; None: the pipeline's.
            references: images that an edit model sees, in order, as paths or PIL images; of a list for all requests.
            **settings: the fields of `GenerateConfig`, if ``prompt`` is a text.

        Returns:
            The images with their settings; for a list one result per request, in its order.

        Raises:
            ConfigError: one problem for each invalid setting, and each LoRA that cannot be used.
            CancelledError: ``cancelled()`` returned true.
            RequestError: the model's output has values that are not finite; of a list it is in the `Result.error` of
                the request, and the others are complete.
        """
        callbacks = Callbacks(progress, preview_every, cancelled, preview_first=preview_first)
        if not isinstance(prompt, str | GenerateConfig):
            if settings:
                raise ConfigError(f"{', '.join(settings)}: set these in the configurations")
            with self._lock:
                requests = self._prepare_all(prompt, init, mask, on_mismatch, finder, references)
                return self.run_all(requests, callbacks, on_image, batch)
        if not isinstance(prompt, GenerateConfig):
            config = parse_request({"prompt": prompt, **settings}, finder or self.finder)
        elif settings:
            raise ConfigError(f"{', '.join(settings)}: set these in the configuration")
        else:
            config = prompt
        with self._lock:
            request = self.prepare(config, init, mask, on_mismatch, finder, references)
            return self.run(request, callbacks, on_image, batch)

    def prepare(
        self,
        config: GenerateConfig,
        init: ImageInput | None = None,
        mask: ImageInput | None = None,
        on_mismatch: OnMismatch = "error",
        finder: LoraFinder | None = None,
        references: Sequence[ImageInput] | None = None,
    ) -> PreparedRequest:
        """Check a request and fill in the model's own values, without denoising; the arguments are those of a call."""
        config = self.prompts.resolve(config)
        if config.image_prompts:
            parts = [self.prepare(each, init, mask, on_mismatch, finder, references) for each in configs_of(config)]
            complete = parts[0].config.model_copy(update={"count": config.count}, check=False)
            return replace(parts[0], config=complete, parts=tuple(parts))
        wrong: list[str | Problem] = []
        sampler = config.sampler or own_sampler(self.model.blueprint.scheduler)
        wrong += problems(sampler, config.schedule, flow=self.model.flow, zero_snr=self.model.zero_snr)
        image, region = open_inputs(config, init, mask, wrong)
        seen = open_references(self.model, config, references, wrong)
        size = size_for(self.model, config, image, seen, wrong)
        choices, tagged = (*self.loras, *config.loras), config.tagged_loras()
        with self._lock:
            loras, unfit = apply_loras(self.model, finder or self.finder, choices, tagged, on_mismatch)
        wrong += unfit
        defaults = self.model.blueprint.variant or self.model.family
        guidance = defaults.guidance if config.guidance is None else config.guidance
        if self.model.family.own_pipeline:
            wrong += pipeline_problems(self.model.family.pipeline, config, image)
            if not wrong and (problem := self.model.family.size_problem(self.model, size, image=True)):
                wrong.append(Problem("width", problem))
        elif config.prompts[0].composed and not self.model.family.is_guided(self.model, guidance):
            wrong.append(composition_problem(self.model, guidance))
        values: dict[str, Any] = {
            "sampler": sampler, "steps": config.steps or defaults.steps, "guidance": guidance,
            "seed": secrets.randbits(32) if config.seed in (None, -1) else config.seed,
            "width": size[0], "height": size[1],
        }  # fmt: skip
        notes = [*filter(None, [device_note(self.model.device)])]
        request = PreparedRequest(config.model_copy(update=values, check=False), loras, image, region, size, (), seen)
        if config.upscale is not None:
            upscale, unfit_pass = complete_pass(self.model, request, self.upscalers)
            wrong += unfit_pass
            complete = request.config.model_copy(update={"upscale": upscale}, check=False)
            request = replace(request, config=complete, keeps_latents=upscale.is_latent)
        if wrong:
            raise ConfigError(wrong)
        if not request.keeps_init:
            notes += size_warnings(size, image.size if image is not None else None, self.model.size)
        return replace(request, warnings=tuple(notes))

    def record(
        self,
        config: GenerateConfig | PreparedRequest,
        init: ImageInput | None = None,
        mask: ImageInput | None = None,
        references: Sequence[ImageInput] | None = None,
    ) -> dict[str, Any]:
        """Return the settings of a request as its images carry them, without generating any."""
        if not isinstance(config, PreparedRequest):
            config = self.prepare(config, init, mask, references=references)
        assert config.config.seed is not None
        return record_of(self.model, self._model_hash, config, config.config.seed)

    def run(
        self, request: PreparedRequest, callbacks: Callbacks,
        on_image: OnImage | None = None, batch: Batch | None = None,
    ) -> Result:  # fmt: skip
        """Generate the images of a request of `prepare`; ``batch`` as in a call."""
        (result,) = self.run_all([request], callbacks, on_image, batch)
        if result.error is not None:
            raise result.error
        return result

    def run_all(
        self, requests: Sequence[PreparedRequest], callbacks: Callbacks,
        on_image: OnImage | None = None, batch: Batch | None = None,
    ) -> list[Result]:  # fmt: skip
        """Generate the images of several requests of `prepare`: in passes, and groups that share batches."""
        size = self.batch if batch is None else check_batch(batch)

        def draw(units: Sequence[PreparedRequest], callbacks: Callbacks, on_image: OnImage | None) -> list[Result]:
            jobs, images = list[Job](), 0
            for unit in units:
                jobs.append(Job(unit, Result([], [], unit.loras), images))
                images += unit.config.count
            drawing = Drawing(self.model, self._model_hash, size, self._measured, callbacks, on_image, images)
            draw_groups(drawing, jobs, self._swap_in, self._conditioning)
            return [job.result for job in jobs]

        with self._lock:
            return Passes(self.model, self._model_hash, self.upscalers, draw, callbacks, on_image).run(requests)

    def running_batch(self, batch: Batch | None = None) -> RunningBatch:
        """Return an empty batch that requests join and leave at any step; while it has any, nothing else may run."""
        most = self.batch if batch is None else check_batch(batch)
        return RunningBatch(self.model, self._model_hash, most, self._measured, self._swap_in, self._conditioning)

    def _prepare_all(
        self,
        configs: Sequence[GenerateConfig],
        init: ImageInput | None,
        mask: ImageInput | None,
        on_mismatch: OnMismatch,
        finder: LoraFinder | None,
        references: Sequence[ImageInput] | None,
    ) -> list[PreparedRequest]:
        """Prepare several requests; the problems of all are one error."""
        prepared, wrong = list[PreparedRequest](), list[str | Problem]()
        for number, config in enumerate(configs):
            if not isinstance(config, GenerateConfig):
                raise ConfigError(f"request {number}: expected a GenerateConfig, got {type(config).__name__}")
            try:
                prepared.append(self.prepare(config, init, mask, on_mismatch, finder, references))
            except ConfigError as error:
                wrong += [f"request {number}: {problem}" for problem in error.problems]
        if wrong:
            raise ConfigError(wrong)
        return prepared

    def _swap_in(self, loras: Sequence[AppliedLora]) -> None:
        """Make the weights those of these LoRAs."""
        self.model.swap(stack_of(loras))

    def _conditioning(self, request: PreparedRequest, added: Added = ()) -> PromptConditioning:
        config = request.config
        assert config.guidance is not None
        return PromptConditioning(
            self.model, config.prompts, config.guidance, request.size, config.clip_skip, added, request.references
        )


def pipeline(
    model: str | os.PathLike[str] = "inweave/emoji",
    *,
    loras: Iterable[str | LoraChoice | Mapping[str, Any]] = (),
    lora_folders: Iterable[str | os.PathLike[str]] = (),
    finder: LoraFinder | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    parts: Mapping[str, str | os.PathLike[str]] | None = None,
    allow_download: bool = False,
    quantize: Quantize = "off",
    offload: Offload = "off",
    quantized_cache_gb: float = CACHE_GB,
    batch: Batch = "auto",
    graph: Graph = "off",
    lora_cache_gb: float = 4.0,
    wildcards: Iterable[str | os.PathLike[str]] = (),
    styles: str | os.PathLike[str] | None = None,
    upscalers: Iterable[str | os.PathLike[str]] = (),
    progress: Callable[[str, int, int], object] | None = None,
) -> Pipeline:
    """Load a model for generating images, with ``loras`` merged while its weights load.

        pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
        pipe("a red apple", seed=7).save("apple.png")

    Args:
        model: "inweave/emoji" (built in), a diffusers folder, a checkpoint file or a Hub id.
        loras: files or names with strengths, "style.safetensors:0.8".
        lora_folders: folders where names of LoRAs are looked up.
        finder: looks up LoRAs in place of ``lora_folders``.
        device: "cpu", "cuda:1", ...; by default a GPU if there is one.
        dtype: "fp32", "fp16", "bf16" or a torch dtype.
        variant: the model in a checkpoint file, if it cannot be detected.
        parts: files of components that a checkpoint file lacks, {"vae": path}.
        allow_download: whether a Hub model may be downloaded.
        quantize: "keep" leaves a checkpoint that is stored quantized (fp8, int8, bitsandbytes, GGUF) like that;
            "off" unpacks it; "int8", "int8-hadamard", "nf4", "nf4-hadamard" or "fp8" quantizes the denoiser.
        offload: "blocks" leaves the weights in host memory and copies them to the device block by block while it
            computes; "auto" does so if the model would not fit on the GPU; "off".
        quantized_cache_gb: disk space for quantized denoisers, so that the next start reads them; 0: none.
        batch: how many images of a request are made together, at most: a number, or "auto".
        graph: "auto" records steps in CUDA graphs on an NVIDIA GPU, "off" runs them eagerly.
        lora_cache_gb: memory for LoRAs that were read; beyond it, the least recently used one is dropped.
        wildcards: folders of the text files that `__name__` in prompts means.
        styles: a file of styles, in the form of A1111's styles.csv.
        upscalers: folders of upscalers (ESRGAN-type networks in safetensors).
        progress: called with (part, bytes loaded, bytes in total) while the weights load.

    Returns:
        The loaded pipeline.

    Raises:
        ConfigError: an argument is invalid, or a LoRA or the model is missing.
        FormatError: a file cannot be read.
        TargetError: a LoRA does not fit the model.
    """
    expect("parts", parts, Mapping, type(None))
    expect("variant", variant, str, type(None))
    expect("allow_download", allow_download, bool)
    if not isinstance(lora_folders, Iterable):
        raise ConfigError(f"lora_folders: expected folders, got {type(lora_folders).__name__}")
    choices, batch = parse_loras(loras), check_batch(batch)
    folders = [lora_folders] if isinstance(lora_folders, str | os.PathLike) else list(lora_folders)
    finder = finder or LoraFinder(folders)
    layers = [(adapter_of(each, finder.find(each)), Strength(components=each.strengths())) for each in choices]
    blueprint = open_model(model, variant=variant, parts=parts, allow_download=allow_download)
    loaded = load_for_images(
        blueprint, loras=layers, device=device, dtype=dtype, quantize=quantize, offload=offload,
        cache_gb=quantized_cache_gb, graph=graph, lora_cache_gb=lora_cache_gb, progress=progress,
    )  # fmt: skip
    prompts, enlargers = PromptSources(wildcards, styles), UpscalerFinder([os.fspath(folder) for folder in upscalers])
    return Pipeline(loaded, loras=choices, finder=finder, batch=batch, prompts=prompts, upscalers=enlargers)
