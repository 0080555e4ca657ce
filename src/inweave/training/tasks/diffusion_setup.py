"""Preparing a run on a diffusion model, before and after weights are read; `language_setup` has the same methods.

DiffusionSetup         dataset read, model identified, settings complete; can be checked, estimated and planned
LoadedDiffusionModel   the task on a loaded model, its caches, its samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isqrt
from pathlib import Path

import torch

from inweave.errors import ConfigError
from inweave.exchange.load import load
from inweave.files.paths import exists, is_file
from inweave.models import embedded
from inweave.models.blank import blank
from inweave.models.blueprint import Blueprint
from inweave.models.model import Model, blueprint_index, file_index, load_model
from inweave.models.open import open_model
from inweave.models.quantized_cache import QuantizedCache
from inweave.models.sd.selection import without_libraries
from inweave.ops.tensors.device import DTYPES, choose_dtype
from inweave.ops.tensors.oom import oom_hint
from inweave.targets.index import ModelIndex
from inweave.training.adapters.attach import dialect_for
from inweave.training.adapters.targets import check_selection, trained_networks
from inweave.training.config.schema import TrainConfig, other_task_settings
from inweave.training.data import caption_lengths
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import BucketFit
from inweave.training.data.cache import TensorCache
from inweave.training.data.digests import sampled_digest
from inweave.training.data.reader import read_dataset
from inweave.training.data.report import DatasetReport, check_dataset
from inweave.training.data.types import Dataset, Example
from inweave.training.distributed.fsdp import shard_model
from inweave.training.distributed.world import World
from inweave.training.execution.modes import mode_problems
from inweave.training.memory.checkpointing import supports_checkpointing
from inweave.training.memory.estimate import Measurements
from inweave.training.memory.quantize_setting import quantize_problems
from inweave.training.output.sample_prompts import sample_requests
from inweave.training.output.samples import SampleImage, Sampler
from inweave.training.tasks.arrivals import Arrivals, usable
from inweave.training.tasks.base import PRECISIONS, OnProgress, no_validation
from inweave.training.tasks.diffusion import DiffusionTask
from inweave.training.tasks.diffusion_data import batch_problems, bucket_rules, check_masks, held_out
from inweave.training.tasks.offload import stream_network
from inweave.training.tasks.references import batch_shapes, reference_fits, reference_problems, seen_captions
from inweave.weights.hold import Quantized


class DiffusionSetup:
    """The dataset, the model without weights, and ``config`` with every open setting filled in."""

    def __init__(self, config: TrainConfig, device: torch.device, on_progress: OnProgress | None = None) -> None:
        if others := other_task_settings(config, "text"):
            raise ConfigError([f"{name}: only applies to language models; leave it out" for name in others])
        self.dataset = read(config, on_progress)
        self.device = device
        self._blanks: dict[tuple[str, bool], Model] = {}
        blueprint = open_model(
            config.model, variant=config.variant, parts=config.parts or None, allow_download=config.allow_download
        )
        plain = device.type == "cpu" and config.quantize == "off" and not config.shard
        self._blueprint = without_libraries(blueprint) if plain else blueprint
        self.config = with_defaults(config, self._blueprint, device)
        sizes = [example.subset.batch_size for example in self.dataset.examples if example.subset.batch_size]
        if sizes and config.is_planned:
            raise ConfigError(
                f"vram: the dataset file sets batch_size {sizes[0]}, which cannot be changed to fit; remove it there, "
                "and set batch_size in the configuration"
            )

    @property
    def measurements(self) -> Measurements:
        side = largest_side(self.config, self._blueprint, self.dataset)
        fits = reference_fits(self._blank(self.config), self.config, self.dataset.examples)
        references = max((tuple(fit.size for fit in each) for each in fits), key=_pixels, default=())
        return Measurements(self._blueprint, self.config, side, chunks=max(self._captions[0]), references=references)

    @property
    def example_count(self) -> int:
        """The number of images."""
        return max(len(self.dataset.examples), 1)

    def validate(self, config: TrainConfig) -> None:
        """Raise ConfigError for problems that need no weights: targets, rules, masks, sample prompts."""
        if config.samples:
            sample_requests(config)
        if problems := check_masks(config, self.dataset.examples):
            raise ConfigError(problems)
        self.dialect(config)
        check_selection(trained_networks(self._blank(config), config), config)

    def dialect(self, config: TrainConfig) -> tuple[str, str]:
        """Return (the dialect of the adapter file, why it is not the usual one)."""
        return dialect_for(config, blueprint_index(self._blueprint))

    def problems(self, config: TrainConfig) -> list[str]:
        """Return the reasons to refuse this run: its dataset, or something the model or the device cannot do."""
        model, examples = self._blank(config), self.dataset.examples
        rules, size = bucket_rules(config, model), config.batch_size
        if wrong := reference_problems(model, config, examples):
            return wrong
        shapes = batch_shapes(model, config, examples)
        places, order = arrange(self.dataset, rules, batch_size=size, whole=config.drop_incomplete, shapes=shapes)
        validation = held_out(examples, places, config)
        repeats = order.without(validation).repeats
        missing = [no_validation(config)] if config.validation_split and not validation else []
        quantized = quantize_problems(model.denoiser, config, self.device)
        impossible = mode_problems(trained_networks(model, config), config, self.device)
        if config.gradient_checkpointing != "off" and not supports_checkpointing(model.denoiser):
            name = type(model.denoiser).__name__
            impossible.append(f'gradient_checkpointing: {name} does not support it; set gradient_checkpointing = "off"')
        return [*missing, *quantized, *impossible, *batch_problems(model, config, examples, places, repeats)]

    def report(self, config: TrainConfig, processes: int) -> tuple[DatasetReport, list[str]]:
        """Return (the report on the dataset of the run, further notes)."""
        model = self._blank(config)
        chunks, notes = self._captions
        lengths = caption_lengths.batch_lengths(model, chunks)
        return _report(config, self.dataset, model, processes, lengths), [*self.dataset.report.notes, *notes]

    def load(self, config: TrainConfig, world: World, *, staged: bool) -> LoadedDiffusionModel:
        """Read the weights and build the task; ``staged``: keep networks in host memory until they are needed."""
        blueprint = self._blueprint
        # a base is known by the weights of its file, not by those that it is quantized to here
        quantizes = config.quantize not in ("off", "keep")
        own = config.quantize == "off" and config.offload == "blocks"  # in memory of its own, and not mapped
        blank = self._blank(config)
        cache, key = QuantizedCache(cache_folder(config) / "quantized", config.quantized_cache_gb), ""
        if quantizes and not config.assistant:  # whose weights are merged in before they are quantized
            key = cache.key(blueprint.denoiser, config.quantize, DTYPES[config.precision], self.device)
        cached = usable(cache.find(key), blank)
        arrivals = Arrivals(blank, config, self.device, staged=staged or config.shard, cached=cached)
        with oom_hint(f"load {blueprint.name}", "set `vram`, so that its parts take turns on the device"):
            where = "cpu" if staged or config.shard or quantizes else self.device
            keep: Quantized = "keep" if config.quantize == "keep" else "off"
            assistants = [(load(config.assistant), 1.0)] if config.assistant else []
            model = load_model(
                blueprint, loras=assistants, device=where, dtype=config.precision, keep="file", quantized=keep,
                arrived=arrivals if quantizes or own else None, cached=cached,
            )  # fmt: skip
        model = replace(model, device=self.device)  # staged networks move there when they are needed
        if staged:
            model.release_weaver()
        quantized = arrivals.note() if quantizes else model.quantization if keep == "keep" else ""
        if cached is not None:
            quantized += "; mapped from the cache"
        elif key and world.first:
            stored = cache.store(key, model.denoiser, quantized, arrivals.extra)
            quantized = "; ".join(filter(None, [quantized, cache.problem, stored]))
        if quantizes and not (staged or config.shard):
            with oom_hint("hold the quantized base", "set `vram`, so that its parts take turns on the device"):
                for network in model.networks.values():
                    network.to(self.device)
        digests = {blueprint.denoiser.folder: arrivals.digests} if quantizes else {}
        sampled = sampled_digest(model.networks, {blueprint.denoiser.folder: arrivals.samples}) if quantizes else None
        sampler = Sampler(model, config, writes=world.first) if config.samples else None
        task = DiffusionTask(model, self.dataset, config, TensorCache(cache_folder(config)))
        task.digests, task.sampled_digest = task.digests | digests, sampled
        return LoadedDiffusionModel(task, model, file_index(model), sampler, self.dataset, staged, quantized)

    @cached_property
    def _captions(self) -> tuple[list[int], list[str]]:
        """The chunks of every example, and notes about them; only tokenizers are read."""
        tokenizers = {folder: make() for folder, make in self._blueprint.tokenizers.items()}
        model = replace(self._blank(self.config), tokenizers=tokenizers)
        captions = caption_lengths.run_captions(self.config, self.dataset)
        captions = seen_captions(model, captions, self.dataset.examples)
        limit = self.config.max_token_length
        known = caption_lengths.measured_captions(model, captions, limit)
        warnings = caption_lengths.long_caption_warnings(model, self.dataset.examples, captions, known, limit)
        return caption_lengths.example_lengths(captions, known.chunks), warnings

    def _blank(self, config: TrainConfig) -> Model:
        """Return the model without weights, which callers only read."""
        key = config.precision, config.quantize == "keep"
        if key not in self._blanks:
            self._blanks[key] = blank(self._blueprint, DTYPES[config.precision], quantized=key[1])
        return self._blanks[key]


@dataclass(frozen=True, slots=True)
class LoadedDiffusionModel:
    """The task, and the networks that take turns on the device."""

    task: DiffusionTask
    model: Model
    index: ModelIndex
    _sampler: Sampler | None
    _dataset: Dataset
    _staged: bool
    quantized: str = ""

    @property
    def base_file(self) -> Path | None:
        """The checkpoint of the base, if it is a single file."""
        path = self.model.blueprint.path
        return path if is_file(path) else None

    def fill_caches(self, world: World, on_progress: OnProgress | None) -> None:
        """Encode in the first process of each machine; the others read its caches, or those on a disk they share."""
        offload = self._staged or self.task.config.shard
        frozen = not self.task.config.train_text_encoders
        encode_prompts = self._sampler.encode if self._sampler is not None and self._staged and frozen else None
        if world.local_rank == 0:
            self.task.prepare(on_progress, staged=offload, with_encoders=encode_prompts)
        world.wait()
        if offload and world.local_rank:
            self.task.offload_unused()

    def shard(self, world: World) -> str:
        """Shard the frozen base over all processes; returns a note for the log."""
        return shard_model(self.model, self.task.networks, world)

    def fuse_blocks(self) -> None:
        """Replace blocks of the trained networks by fused ones, for a GPU; adapters are attached already."""
        from inweave.models.fused.blocks import fuse_blocks  # imports diffusers' networks, for seconds
        from inweave.models.siblings import stack_siblings

        self.model.release_weaver()  # it would write to the old memory of convolution weights
        for network in self.task.networks.values():
            fuse_blocks(network)
            stack_siblings(network, across=self.task.config.offload != "blocks")

    def stream_blocks(self, resident: int) -> str:
        """Stream the denoiser's blocks, but for ``resident`` of them, from now on; returns a note for the log."""
        denoiser = self.model.denoiser
        blocks = self.model.family.blocks(denoiser)
        self.task.stream, note = stream_network(denoiser, blocks, self.task.device, resident)
        return note

    def notes(self) -> list[str]:
        """Return notes for the log about the dataset."""
        report = _report(self.task.config, self._dataset, self.model, 1, self.task.batch_lengths)
        return [*report.warnings(), *self._dataset.report.notes, *self.task.notes(), *self.task.new_notes()]

    def sampler(self) -> Callable[[int], list[SampleImage]] | None:
        """Return the function that generates samples; None if none are configured."""
        sampler, config = self._sampler, self.task.config
        if sampler is None or not (self._staged or config.shard):
            return sampler
        # frozen text encoders have encoded the prompts already, in the process that generates
        needed = ("vae",) if self._staged and not config.train_text_encoders else tuple(self.model.networks)

        def sample(step: int) -> list[SampleImage]:
            with self.task.on_device(*needed):
                return sampler(step)

        return sample


def with_defaults(config: TrainConfig, blueprint: Blueprint, device: torch.device) -> TrainConfig:
    """Fill in the settings left open, from the preset of the model's family, the model and the device."""
    explicit = config.precision if "precision" in config.model_fields_set else "auto"
    precision = PRECISIONS[choose_dtype(None if explicit == "auto" else explicit, device)]
    return config.with_preset(blueprint.family.preset_name(blueprint)).model_copy(update={"precision": precision})


def cache_folder(config: TrainConfig) -> Path:
    """Return the folder of encodings and of verdicts on images."""
    return Path(config.cache_dir) if config.cache_dir else Path.home() / ".cache" / "inweave" / "train"


def read(config: TrainConfig, on_progress: OnProgress | None = None) -> Dataset:
    """Read the dataset of a folder, a dataset file or its tables, or one that is bundled."""
    source = config.dataset
    if isinstance(source, str) and source.startswith("inweave/") and not exists(source):
        source = str(embedded.style_folder(source))
    extensions, skip = config.caption_extensions, config.skip_unreadable
    on_file = None if on_progress is None else partial(on_progress, "checking images")
    return read_dataset(
        source, caption=config.caption, caption_extensions=extensions, skip_unreadable=skip, control=config.control,
        cache=cache_folder(config), on_file=on_file,
    )  # fmt: skip


def crop_plan(config: TrainConfig) -> tuple[TrainConfig, list[tuple[Example, BucketFit | None]]]:
    """Return (the full configuration, how every image is scaled and cropped); needs no captions."""
    changes = {"caption": config.caption or "-", "skip_unreadable": True}
    dataset = read(config.model_copy(update=changes))
    blueprint = open_model(config.model, variant=config.variant, parts=config.parts or None)
    config = with_defaults(config, blueprint, torch.device("cpu"))
    rules = bucket_rules(config, blank(blueprint, DTYPES[config.precision]))
    places, _ = arrange(dataset, rules, batch_size=config.batch_size)
    return config, list(zip(dataset.examples, places, strict=True))


def largest_side(config: TrainConfig, blueprint: Blueprint, dataset: Dataset) -> int | None:
    """Return the side of a square with the area of the largest bucket, which decides memory; None without images."""
    model = blank(blueprint, DTYPES[config.precision])
    places, _ = arrange(dataset, bucket_rules(config, model), batch_size=config.batch_size or 1)
    areas = [place.bucket.width * place.bucket.height for place in places if place is not None]
    return -(-isqrt(max(areas)) // model.patch) * model.patch if areas else None


def _pixels(sizes: Sequence[tuple[int, int]]) -> int:
    return sum(width * height for width, height in sizes)


def _report(
    config: TrainConfig, dataset: Dataset, model: Model, processes: int, lengths: Sequence[int]
) -> DatasetReport:
    """Return the report on the dataset of this run."""

    def validation(places: list[BucketFit | None]) -> set[int]:
        return held_out(dataset.examples, places, config)

    return check_dataset(
        dataset, bucket_rules(config, model), batch_size=config.batch_size, masked_loss=config.masked_loss,
        accumulation=config.gradient_accumulation * processes, steps=config.steps,
        epochs=None if config.steps else config.epochs or 1, epoch_steps=config.epoch_steps, lengths=lengths,
        held_out=validation, whole=config.drop_incomplete, shapes=batch_shapes(model, config, dataset.examples),
    )  # fmt: skip
