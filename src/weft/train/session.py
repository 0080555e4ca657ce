"""From a configuration to a trained file: model, data, task, run.

weft.train(weft.TrainConfig.load("style.toml"))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.models.model import Model, file_index, load_model
from weft.train.cache import TensorCache
from weft.train.check import DatasetReport, check_dataset
from weft.train.config import TrainConfig
from weft.train.dataset import Dataset, read_dataset
from weft.train.diffusion import DiffusionTask, bucket_rules
from weft.train.journal import Tell
from weft.train.memory import apply_checkpointing
from weft.train.run import Finished, Run
from weft.train.samples import sampler
from weft.train.world import World, join

if TYPE_CHECKING:
    from weft.train.language import TextReport

Tick = Callable[[str, int, int], None]
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def train(
    config: TrainConfig, *, tell: Tell | None = None, tick: Tick | None = None, world: World | None = None
) -> Finished:
    """Train an adapter; everything is checked before the first step."""
    joined = world or join(config.device)
    try:
        if is_language(config):
            from weft.train.language import language_run

            run, sample = language_run(config, joined), None
        else:
            run, sample = diffusion_run(config, joined, tick)
        return run.train(sample=sample, tell=tell)
    finally:
        joined.leave()


def is_language(config: TrainConfig) -> bool:
    """Whether the model is one of words: a folder with a transformers configuration and no model_index.json."""
    folder = Path(config.model)
    return folder.is_dir() and (folder / "config.json").is_file() and not (folder / "model_index.json").is_file()


def diffusion_run(
    config: TrainConfig, world: World, tick: Tick | None
) -> tuple[Run, Callable[[int], list[Path]] | None]:
    dataset = read(config)
    model = opened(config, world)
    config = settled(config, model)
    sample = sampler(model, config) if config.sample_every else None
    cache = TensorCache(Path(config.cache_dir) if config.cache_dir else Path.home() / ".cache" / "weft" / "train")
    task = DiffusionTask(model, dataset, config, cache)
    run = Run(task, model, file_index(model), config, world)
    run.resume(config.resume)  # what is refused is refused before hours of encoding
    if world.first:
        task.prepare(tick)
    world.wait()
    apply_checkpointing(task.networks, config.checkpointing)
    return run, sample


def opened(config: TrainConfig, world: World) -> Model:
    """The model to adapt, on this process's device, in the working precision."""
    wanted = config.precision if "precision" in config.model_fields_set else "auto"
    return load_model(
        config.model,
        device=world.device(config.device),
        dtype=None if wanted == "auto" else wanted,
        variant=config.variant,
        parts=config.parts or None,
        keep="file",
    )


def settled(config: TrainConfig, model: Model) -> TrainConfig:
    """What the user left open, from the preset of the model's family and the model itself."""
    return config.with_preset(preset_of(model)).model_copy(update={"precision": PRECISIONS[model.dtype]})


def read(config: TrainConfig) -> Dataset:
    return read_dataset(
        config.dataset, caption=config.caption, caption_extensions=config.caption_extensions, skip_bad=config.skip_bad
    )


def preset_of(model: Any) -> str:
    """The name of the preset that suits a model."""
    variant = model.blueprint.variant
    if variant is not None and variant.name == "weft/emoji":
        return "weft/emoji"
    width = getattr(model.denoiser.config, "cross_attention_dim", 768)
    return "sd2" if model.family == "sd" and width == 1024 else str(model.family)


def check(config: TrainConfig) -> tuple[TrainConfig, DatasetReport | TextReport, dict[str, Any]]:
    """Read everything and train nothing: (what would be used, the dataset's report, an estimate)."""
    from weft.train.memory import estimate

    if is_language(config):
        from weft.train.language import check_texts

        return check_texts(config)
    dataset = read(config)
    model = opened(config, World())
    config = settled(config, model)
    report = check_dataset(
        dataset,
        bucket_rules(config, model),
        batch_size=config.batch_size,
        accumulation=config.accumulation,
        steps=config.steps,
        epochs=None if config.steps else config.epochs or 1,
    )
    return config, report, estimate(model, config, report.total_steps)
