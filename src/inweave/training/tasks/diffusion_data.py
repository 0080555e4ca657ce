"""Decisions about the images of a run that need no weights: buckets, validation examples, and problems."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from inweave.files.paths import printable_path
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.buckets import BucketFit, BucketRules
from inweave.training.data.images import uses_mask
from inweave.training.data.types import Example
from inweave.training.tasks.base import generator_for


def bucket_rules(config: TrainConfig, model: Model) -> BucketRules:
    """Return the bucket rules for a model: the step is a multiple of its patch size, and never above the resolution."""
    size = config.resolution or model.size
    side = size if isinstance(size, int) else min(size)
    step = max(model.patch, min(config.bucket_step, side) // model.patch * model.patch)
    low = min(config.min_bucket, side)
    return BucketRules(size, step, low, config.max_bucket, config.upscale, config.buckets, config.bucket_rule)


def batch_problems(
    model: Model,
    config: TrainConfig,
    examples: Sequence[Example],
    places: Sequence[BucketFit | None],
    repeats: Sequence[int],
) -> list[str]:
    """Return problems with the data of a run that would otherwise show up late or never."""
    problems = []
    if not sum(repeats):
        problems.append("dataset: there is no image that can be trained on; `inweave train --check` says why")
    uneven = {str(p.bucket) for p in places if p and (p.bucket.width % model.patch or p.bucket.height % model.patch)}
    if uneven:
        problems.append(
            f"buckets of {', '.join(sorted(uneven))}: {model.name} needs sides that are multiples of {model.patch}; "
            "change bucket_reso_steps or resolution in the dataset file"
        )
    sizes = sorted({(p.bucket.width, p.bucket.height) for p in places if p} if not uneven else ())
    problems += [f"buckets: {text}" for size in sizes if (text := model.family.size_problem(model, size))][:1]
    if config.prior_prediction and not any(example.regularization for example in examples):
        problems.append(
            "prior_prediction: the dataset has no regularization images; put them into a folder reg/, or set is_reg = "
            "true for their subset"
        )
    return problems + check_masks(config, examples)


def check_masks(config: TrainConfig, examples: Sequence[Example]) -> list[str]:
    """Return what is wrong with the masks of a dataset."""
    used = [example for example in examples if example.mask is not None and uses_mask(config, example)]
    if config.masked_loss and not used:
        return [
            "masked_loss: no image has a mask; put name-masklabel.png next to name.png, or set alpha_mask in the "
            "dataset file"
        ]
    if used and all(example.mask_is_black for example in used):
        return [
            f"masked_loss: {len(used)} images have a mask, and all of the masks are black, so nothing is trained on "
            f"these images, the first being {printable_path(used[0].path)}; paint the areas to train white, or turn "
            "masked_loss (or alpha_mask in the dataset file) off"
        ]
    return []


def held_out(examples: Sequence[Example], places: Sequence[BucketFit | None], config: TrainConfig) -> set[int]:
    """Return the examples for validation: a share of the images, chosen by the seed, without regularization images."""
    subject = [n for n, example in enumerate(examples) if not example.regularization and places[n] is not None]
    count = min(round(len(subject) * config.validation_split), len(subject) - 1) if config.validation_split else 0
    shuffled = torch.randperm(len(subject), generator=generator_for(config.seed, -1)).tolist()
    return {subject[i] for i in shuffled[: max(count, 0)]}


def batches_of(
    numbers: Sequence[int],
    places: Sequence[BucketFit | None],
    lengths: Sequence[int],
    size: int,
    shapes: Sequence[Hashable] = (),
) -> list[tuple[int, ...]]:
    """Return batches of these examples, each from one bucket and with captions of one length, and one of ``shapes``."""
    by_bucket: dict[object, list[int]] = {}
    for number in numbers:
        if (place := places[number]) is not None:
            alike = (*lengths[number : number + 1], *shapes[number : number + 1])
            by_bucket.setdefault((place.bucket, *alike), []).append(number)
    return [tuple(row[i : i + size]) for row in by_bucket.values() for i in range(0, len(row), size)]
