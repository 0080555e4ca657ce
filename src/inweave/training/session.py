"""From a configuration to a trained file: model, data, task, run.

inweave.train(inweave.TrainConfig.load("style.toml"))
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inweave.errors import ConfigError
from inweave.models import embedded
from inweave.models.blueprint import Blueprint
from inweave.models.model import file_index, load_model
from inweave.models.open import open_model
from inweave.ops.device import DTYPES, choose_device, choose_dtype
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import BucketRules, Placement
from inweave.training.data.cache import TensorCache
from inweave.training.data.caption_lengths import long_caption_warnings, max_chunks, run_captions
from inweave.training.data.reader import read_dataset
from inweave.training.data.report import DatasetReport, check_dataset
from inweave.training.data.types import Dataset
from inweave.training.distributed.fsdp import check_shard, shard_model
from inweave.training.distributed.world import World, join
from inweave.training.loop import Finished, Run, Sample
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.estimate import Plan, enforce, estimate, lift, seconds_for
from inweave.training.memory.meta import Meter, blank
from inweave.training.memory.oom import needing
from inweave.training.memory.plan import within_limit
from inweave.training.output.adapter_file import base_hashes, refusals, refuse_existing
from inweave.training.output.log import Drawn, Tell
from inweave.training.output.samples import Sampler, sample_requests
from inweave.training.tasks.diffusion import DiffusionTask, bucket_rules, check_masks, held_out
from inweave.weights.weaver import Weaver

if TYPE_CHECKING:
    from inweave.training.data.texts import TextReport

Tick = Callable[[str, int, int], None]
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def train(
    config: TrainConfig, *, tell: Tell | None = None, tick: Tick | None = None, world: World | None = None
) -> Finished:
    """Train an adapter; everything is checked before the first step."""
    joined = world or join(config.device)
    try:
        if is_language(config):
            from inweave.training.tasks.language import language_run

            run, sample = language_run(config, joined), None
        else:
            run, sample = diffusion_run(config, joined, tick)
        return run.train(sample=sample, tell=tell)
    finally:
        if config.vram is not None:
            lift(choose_device(joined.device(config.device)))
        joined.leave()


def is_language(config: TrainConfig) -> bool:
    """Whether the model is one of words: a folder with a transformers configuration and no model_index.json."""
    folder = Path(config.model)
    return folder.is_dir() and (folder / "config.json").is_file() and not (folder / "model_index.json").is_file()


def diffusion_run(config: TrainConfig, world: World, tick: Tick | None) -> tuple[Run, Sample | None]:
    check_shard(config, world)
    dataset = read(config)
    blueprint = _blueprint(config)
    device = choose_device(world.device(config.device))
    config = settled(config, blueprint, device)
    planned = _within_limit(config, blueprint, device, world, dataset)
    config, staged = (planned.config, planned.staged) if planned is not None else (config, False)
    refuse_existing(config)  # what is refused is refused before hours of encoding
    if planned is not None:
        enforce(planned.limit, device)
    begin = "cpu" if staged or config.shard else device
    with needing(f"load {blueprint.name}", "set `vram`, so that its parts take turns on the device"):
        model = load_model(blueprint, device=begin, dtype=config.precision, keep="file")
    model.device = device  # where the work is done; staged networks come there when their turn is
    if staged:
        model.weaver = Weaver({})  # it holds every weight where it was loaded, and in training nothing is woven
    sample = Sampler(model, config, writes=world.first) if config.sample_every else None
    cache = TensorCache(Path(config.cache_dir) if config.cache_dir else Path.home() / ".cache" / "inweave" / "train")
    task = DiffusionTask(model, dataset, config, cache)
    if staged:  # adapters stay where they were made, so their network has to be on the device before them
        frozen = sample is not None and not config.train_text_encoders
        _prepare(task, world, tick, staged=True, beside=sample.encode if sample is not None and frozen else None)
    with needing("hold the adapter and its optimizer", 'lower `rank`, or set optimizer = "adamw8bit"'):
        run = Run(task, model, file_index(model), config, world)
    run.resume(config.resume)
    if not staged:
        _prepare(task, world, tick, staged=config.shard)
    if world.first and blueprint.path.is_file():
        run.base_hashes = ThreadPoolExecutor(1, "inweave-hash").submit(base_hashes, blueprint.path)
    if world.first:
        run.told = [
            ("dataset", line) for line in (*_report(config, dataset, task.rules, 1)[0].warnings(), *task.notes())
        ]
    if planned is not None:
        run.choices = list(planned.reasons)
        run.meter = Meter(device, planned.estimate["kept_bytes"])
    if config.shard:
        run.choices.append(shard_model(model, task.networks, world))
    apply_checkpointing(task.networks, config.gradient_checkpointing)
    if sample is None or not (staged or config.shard):
        return run, sample
    # encoders that never change were asked before, by the process that draws
    needed = ("vae",) if staged and not config.train_text_encoders else tuple(model.networks)
    return run, _beside(task, sample, needed)


def _blueprint(config: TrainConfig) -> Blueprint:
    return open_model(config.model, variant=config.variant, parts=config.parts or None)


def settled(config: TrainConfig, blueprint: Blueprint, device: torch.device) -> TrainConfig:
    """What the user left open, from the preset of the model's family, the model and the device."""
    wanted = config.precision if "precision" in config.model_fields_set else "auto"
    precision = PRECISIONS[choose_dtype(None if wanted == "auto" else wanted, device)]
    return config.with_preset(blueprint.family.preset_name(blueprint)).model_copy(update={"precision": precision})


def _within_limit(
    config: TrainConfig,
    blueprint: Blueprint,
    device: torch.device,
    world: World,
    dataset: Dataset,
    sizes: tuple[int | None, int] | None = None,
) -> Plan | None:
    """``sizes``: the largest side and the most chunks, where they are known."""
    own = [example.subset.batch_size for example in dataset.examples if example.subset.batch_size]
    if own and config.vram is not None:
        raise ConfigError(
            f"vram: the dataset's file says batch_size {own[0]}, which cannot be changed to fit; take it out of there, and "
            "set batch_size in the configuration"
        )
    if config.vram is None:
        return None
    sizes = sizes or (largest_side(config, blueprint, dataset), _chunks(config, blueprint, dataset)[0])
    return within_limit(blueprint, config, device, world, *sizes)


def _chunks(config: TrainConfig, blueprint: Blueprint, dataset: Dataset) -> tuple[int, list[str]]:
    """Of the longest caption, and what to say of it; only tokenizers are read."""
    model = blank(blueprint, DTYPES[config.precision])
    model.tokenizers = {folder: make() for folder, make in blueprint.tokenizers.items()}
    captions = run_captions(config, dataset)
    chunks = max_chunks(model, captions)
    return chunks, long_caption_warnings(model, dataset.examples, captions, chunks)


def largest_side(config: TrainConfig, blueprint: Blueprint, dataset: Dataset) -> int | None:
    """Of a square as large as the largest bucket: what a step needs grows with its area; None for an empty set."""
    model = blank(blueprint, DTYPES[config.precision])
    places, _ = arrange(dataset, bucket_rules(config, model), batch_size=config.batch_size)
    areas = [place.bucket.width * place.bucket.height for place in places if place is not None]
    return -(-isqrt(max(areas)) // model.patch) * model.patch if areas else None


def _prepare(
    task: DiffusionTask,
    world: World,
    tick: Tick | None,
    *,
    staged: bool,
    beside: Callable[[], None] | None = None,
) -> None:
    """Only the first process encodes; the others find it done."""
    if world.first:
        task.prepare(tick, staged=staged, beside=beside)
    world.wait()
    if staged and not world.first:
        task.offload_unused()


def _beside(task: DiffusionTask, sample: Sampler, networks: tuple[str, ...]) -> Sample:
    """Draw with these networks on the device too."""

    def draw(step: int) -> list[Drawn]:
        with task.on_device(*networks):
            return sample(step)

    return draw


def read(config: TrainConfig) -> Dataset:
    shipped = config.dataset.startswith("inweave/") and not Path(config.dataset).exists()
    where = embedded.style_folder(config.dataset) if shipped else config.dataset
    return read_dataset(
        where,
        caption=config.caption,
        caption_extensions=config.caption_extensions,
        skip_unreadable=config.skip_unreadable,
    )


def _report(config: TrainConfig, dataset: Dataset, rules: BucketRules, processes: int) -> tuple[DatasetReport, int]:
    """The set as this run sees it, and how many examples it holds out."""
    kept: set[int] = set()

    def apart(places: list[Placement | None]) -> set[int]:
        kept.update(held_out(dataset.examples, places, config))
        return kept

    report = check_dataset(
        dataset,
        rules,
        batch_size=config.batch_size,
        accumulation=config.gradient_accumulation * processes,
        steps=config.steps,
        epochs=None if config.steps else config.epochs or 1,
        masked_loss=config.masked_loss,
        held_out=apart,
    )
    return report, len(kept)


def check(config: TrainConfig, processes: int = 1) -> tuple[TrainConfig, DatasetReport | TextReport, dict[str, Any]]:
    """Read everything and train nothing: (what would be used, the dataset's report, an estimate)."""
    if is_language(config):
        from inweave.training.tasks.language import check_texts

        return check_texts(config, processes)
    dataset = read(config)
    blueprint, device = _blueprint(config), choose_device(config.device)
    config = settled(config, blueprint, device)
    if config.sample_every:
        sample_requests(config)
    if wrong := check_masks(config, dataset.examples):
        raise ConfigError(wrong)
    side, (chunks, said) = largest_side(config, blueprint, dataset), _chunks(config, blueprint, dataset)
    planned = _within_limit(config, blueprint, device, World(), dataset, (side, chunks))
    config = planned.config if planned is not None else config
    dtype = DTYPES[config.precision]
    report, kept = _report(config, dataset, bucket_rules(config, blank(blueprint, dtype)), processes)
    needs = dict(planned.estimate if planned is not None else estimate(blueprint, config, side=side, chunks=chunks))
    needs["steps"] = report.total_steps
    needs["seconds"] = seconds_for(needs["work_per_step"] * report.total_steps, device, dtype)
    needs["choices"] = [*(planned.reasons if planned is not None else ()), *said]
    needs["problems"] = refusals(config, kept > 0)
    if not report.total_steps or not report.batches_per_epoch:
        needs["problems"].append("dataset: there is no picture that can be trained on")
    return config, report, needs
