"""Small image datasets, and tasks on the tiny models of `tests.peers.tiny_models`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from inweave.models.families.base import Tensors
from inweave.models.model import Model, load_model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.cache import TensorCache
from inweave.training.data.reader import read_dataset
from inweave.training.tasks.base import generators_for
from inweave.training.tasks.diffusion import DiffusionTask
from tests.peers import tiny_models as tiny

CAPTIONS = {"a": "a red apple, table, still life", "b": "a blue boat, sea, sail, sky"}


def color_image(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """An image with edges and colors."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def make_set(
    folder: Path, captions: Mapping[str, str] = CAPTIONS, size: tuple[int, int] = (64, 64), first: int = 0
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(captions.items()):
        color_image(first + number, *size).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return folder


@cache
def shared_model(variant: str = "sd1.5") -> Model:
    """A shared model that must not be changed."""
    with tiny.quick_tokenizers():
        return load_model(tiny.folder(variant), device="cpu", dtype="fp32", keep="file")


def fresh_model(variant: str = "sd1.5") -> Model:
    """A model of one's own; copied, which is quicker than loading. It has no weaver."""
    shared, nothing = shared_model(variant), cast("Any", None)
    return replace(
        shared, networks={name: deepcopy(network) for name, network in shared.networks.items()}, weaver=nothing
    )


def config(dataset: Path, **settings: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model": "tiny", "dataset": str(dataset), "output": str(dataset.parent / "out"), "name": "t", "steps": 3,
        "batch_size": 2, "rank": 4, "resolution": 64, "min_bucket": 32, "bucket_step": 32, "save_dtype": "fp32",
        "log_every": 1, "precision": "fp32", "learning_rate": 1e-2,
    }  # fmt: skip
    if settings.get("train_text_encoders"):
        usual["cache_text"] = False
    return TrainConfig.of(**{**usual, **settings})


def task_on(
    dataset: Path, *, model: Model | None = None, cache_at: Path | TensorCache | None = None, **settings: Any
) -> DiffusionTask:
    cache = cache_at if isinstance(cache_at, TensorCache) else TensorCache(cache_at)
    return DiffusionTask(model or shared_model(), read_dataset(dataset), config(dataset, **settings), cache)


def sample_inputs(task: DiffusionTask, step: int = 0, batch: tuple[int, ...] = (0, 1)) -> Tensors:
    return task.sample_batch(batch, generators_for(0, [(step, number) for number in batch]))


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
