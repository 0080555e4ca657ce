"""The order of the examples of a run.

    batches   each from one bucket, with captions of one length if padding would change them; within a bucket
              regularization images are interleaved evenly with the others, so that every batch has both in the ratio of
              their repeats, to within one image
    order     a bucket's images keep their shuffled order for any batch size; buckets are merged at random. So images of
              one size appear in the same order in batches of 4 and of 1
    m         = step * accumulation * world + j, the number of a micro-batch in the whole run; it is batch
              m % n of epoch m // n, where n is the number of batches per epoch; rank r takes m % world == r
    position  (epoch, example, its earlier appearances in this epoch): the randomness of an example depends on it alone,
              and not on its neighbors, its micro-batch or its process
    total     = ceil(epochs * n / (accumulation * world)) steps, unless the number of steps is set; kohya's scripts take
              epochs * ceil(n / (accumulation * world)), which epoch_steps = "whole" asks for

An epoch's order is a function of (seed, epoch) and the list of examples alone. It is the order of raw PCG64 words,
whose stream numpy guarantees, so it is the same on every platform and for every number of processes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from inweave.errors import ConfigError
from inweave.training.config.dataset_toml import Subset
from inweave.training.data.buckets import BucketFit, BucketRules, assign
from inweave.training.data.types import Dataset

Position = tuple[int, int, int]  # epoch, example, its earlier appearances in this epoch


def epoch_batches(
    buckets: Sequence[Hashable],
    repeats: Sequence[int],
    batch_size: int | Mapping[Hashable, int],
    seed: int,
    epoch: int,
    *,
    regularization: Sequence[bool] = (),
    whole: bool = False,
) -> list[tuple[int, ...]]:
    """Return an epoch as batches of indices: example i, of bucket ``buckets[i]``, appears ``repeats[i]`` times.

    ``whole``: without the images of a bucket that are left over when it is cut into batches, others in each epoch.
    """
    sizes = [batch_size] if isinstance(batch_size, int) else batch_size.values()
    if seed < 0 or epoch < 0 or min(sizes, default=1) < 1:
        raise ConfigError(f"seed {seed}, epoch {epoch}, batch size {batch_size}: expected 0, 0 and 1 or more")
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    members: dict[Hashable, tuple[list[int], list[int]]] = {}
    for index, (bucket, count) in enumerate(zip(buckets, repeats, strict=True)):
        kind = bool(regularization) and regularization[index]
        members.setdefault(bucket, ([], []))[kind].extend([index] * count)
    batches: list[tuple[int, tuple[int, ...]]] = []  # with a random number to sort by
    for bucket, kinds in members.items():
        subject, prior = (
            [kind[index] for index in np.argsort(_words(len(kind), bits), kind="stable")] for kind in kinds
        )
        line = _interleave(subject, prior)
        size = batch_size if isinstance(batch_size, int) else batch_size[bucket]
        places = np.sort(_words(len(line), bits)).tolist()  # one per image, ascending: batches keep their order
        for start in range(0, len(line) // size * size if whole else len(line), size):
            batch = tuple(line[start : start + size])
            batches.append((places[start + len(batch) // 2], batch))
    return [batch for _, batch in sorted(batches, key=lambda entry: entry[0])]


def _words(count: int, bits: np.random.PCG64) -> npt.NDArray[np.uint64]:
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


def _interleave(some: list[int], others: list[int]) -> list[int]:
    """Merge two lists evenly: the i-th of n goes to (2 i + 1) / 2 n of the length."""
    n, m = len(some), len(others)
    keyed = [((2 * i + 1) * m, 0, each) for i, each in enumerate(some)] if m else [(0, 0, each) for each in some]
    keyed += [((2 * j + 1) * n, 1, each) for j, each in enumerate(others)]
    return [each for *_, each in sorted(keyed, key=lambda entry: entry[:2])]


def position(step: int, micro: int, *, accumulation: int, world: int, batches_per_epoch: int) -> tuple[int, int]:
    """Return (epoch, index) of the ``micro``-th micro-batch of an optimizer step, over all processes together."""
    if batches_per_epoch < 1:
        raise ConfigError("an epoch has no batch: the dataset has no examples")
    return divmod(step * accumulation * world + micro, batches_per_epoch)


@dataclass(frozen=True)
class Order:
    """The batches of a whole run, for any step and any number of processes."""

    buckets: tuple[Hashable, ...]
    repeats: tuple[int, ...]
    batch_size: int | Mapping[Hashable, int]
    seed: int = 0
    regularization: tuple[bool, ...] = ()
    whole: bool = False
    _epochs: dict[int, list[tuple[Position, ...]]] = field(default_factory=dict, compare=False, repr=False)

    def without(self, examples: Collection[int]) -> Order:
        """Return the order without these examples, whose indices stay."""
        repeats = tuple(0 if number in examples else count for number, count in enumerate(self.repeats))
        return replace(self, repeats=repeats, _epochs={})

    def batches(self, epoch: int) -> list[tuple[int, ...]]:
        return [tuple(example for _, example, _ in batch) for batch in self.positions(epoch)]

    def __len__(self) -> int:
        """Batches per epoch, the same in every epoch."""
        return len(self.positions(next(iter(self._epochs), 0)))

    @property
    def sizes(self) -> set[tuple[Hashable, int]]:
        """(bucket, number of examples) of the batches of an epoch, the same in every epoch."""
        return {(self.buckets[batch[0]], len(batch)) for batch in self.batches(next(iter(self._epochs), 0))}

    def positions(self, epoch: int) -> list[tuple[Position, ...]]:
        """Return the position of every example of `batches`."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a step may reach into the next epoch, never further back than one
                self._epochs.pop(next(iter(self._epochs)))
            batches = epoch_batches(
                self.buckets, self.repeats, self.batch_size, self.seed, epoch, regularization=self.regularization,
                whole=self.whole,
            )  # fmt: skip
            appearances: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
            self._epochs[epoch] = [
                tuple((epoch, example, next(appearances[example])) for example in batch) for batch in batches
            ]
        return self._epochs[epoch]

    def step_positions(
        self, step: int, *, accumulation: int = 1, world: int = 1, rank: int = 0
    ) -> list[tuple[Position, ...]]:
        """Return the micro-batches of rank ``rank`` of ``world`` in an optimizer step, as positions."""
        if not 0 <= rank < world or accumulation < 1 or step < 0:
            raise ConfigError(f"step {step}, accumulation {accumulation}, rank {rank} of {world}: no such step")
        batches = []
        for micro in range(rank, accumulation * world, world):
            epoch, index = position(step, micro, accumulation=accumulation, world=world, batches_per_epoch=len(self))
            batches.append(self.positions(epoch)[index])
        return batches


def total_steps(batches_per_epoch: int, micro_batches: int, *, steps: int | None, epochs: int | None) -> int:
    """Return the optimizer steps of a run with ``micro_batches`` per step over all processes together."""
    return steps if steps is not None else -(-(epochs or 1) * batches_per_epoch // micro_batches)


def epoch_length(batches: int, micro_batches: int, epoch_steps: str) -> int:
    """Return the batches that an epoch counts: with ``epoch_steps`` "whole" as many as its steps would hold."""
    return -(-batches // micro_batches) * micro_batches if epoch_steps == "whole" else batches


def arrange(
    dataset: Dataset,
    rules: BucketRules,
    *,
    batch_size: int = 1,
    seed: int = 0,
    lengths: Sequence[int] = (),
    whole: bool = False,
    shapes: Sequence[Hashable] = (),
) -> tuple[list[BucketFit | None], Order]:
    """Return (how every example fits into its bucket, None if it is too small for any; the order of the run).

    ``lengths``: of the captions of every example, if they must be equal in a batch (`caption_lengths`); ``whole``:
    without batches that are not full; ``shapes``: what else must be equal in a batch.
    """
    if batch_size < 1:
        raise ConfigError(f"batch size {batch_size}: expected 1 or more")
    subset_rules = {subset: _rules_of(subset, rules) for subset in {example.subset for example in dataset.examples}}
    placements: list[BucketFit | None] = []
    fits: dict[tuple[int, tuple[int, int]], BucketFit | None] = {}  # (subset, size): a dataset has few of them
    slots: list[Hashable] = []
    sizes: dict[Hashable, int] = {}
    for number, example in enumerate(dataset.examples):
        key = (id(example.subset), example.size)
        if key not in fits:
            try:
                fits[key] = assign(example.size, subset_rules[example.subset])
            except ConfigError:  # too small
                fits[key] = None
        placement = fits[key]
        size = example.subset.batch_size or batch_size
        placements.append(placement)
        alike = (lengths[number],) if lengths and size > 1 else ()
        slots.append((placement and placement.bucket, size, *alike, *shapes[number : number + 1]))
        sizes[slots[-1]] = size
    repeats = [each.repeats if place else 0 for each, place in zip(dataset.examples, placements, strict=True)]
    prior = tuple(example.regularization for example in dataset.examples)
    order = Order(tuple(slots), tuple(repeats), sizes, seed, prior, whole)
    if whole and any(repeats) and not len(order):
        raise ConfigError(
            f"drop_incomplete: no bucket has {batch_size} images for a batch; lower batch_size, or set it to false"
        )
    return placements, order


def _rules_of(subset: Subset, rules: BucketRules) -> BucketRules:
    """Return the run's rules with the subset's own settings."""
    own: dict[str, Any] = {"resolution": subset.resolution, "step": subset.bucket_step, "upscale": subset.upscale}
    own |= {"minimum": subset.min_bucket, "maximum": subset.max_bucket, "enabled": subset.buckets}
    if subset.resolution and subset.resolution != rules.size and rules.rule == "inweave":
        # the run's limits belong to the run's resolution
        rules = replace(rules, minimum=None, maximum=None)
    return replace(rules, **{name: value for name, value in own.items() if value is not None})
