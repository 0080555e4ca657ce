"""What a plan may change, from the least change to the smallest need, in groups.

    1  nothing
    2  encoders leave the device; batches are split, activations recomputed; with `quantize = "auto"` also every format
    3  full recomputation, with the inputs of blocks in host memory (`offload_activations = "auto"`)
    4  2 and 3 with the blocks of the denoiser streamed from host memory (`offload = "auto"`)
    5  the same with the state of AdamW in 8 bits, unless the optimizer was chosen
    6  2 to 5 in bf16, if the model is in float32

A group is considered only if nothing in the groups before it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from inweave.models.blank import blank
from inweave.ops.quantized import FORMATS
from inweave.ops.tensors.device import choose_device
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.estimate import Measurements, sum_up
from inweave.training.memory.quantize_setting import quantize_problems
from inweave.training.memory.speed import Speed

MODES = ("off", "selective", "full")
#: batch sizes of `batch_size = "auto"`
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration; ``size``: examples at a time; ``resident``: blocks that stay on the device."""

    config: TrainConfig
    staged: bool
    size: int
    resident: int = 0

    @property
    def parts(self) -> int:
        """The number of parts each batch is split into."""
        return -(-self.config.batch_size // self.size)

    def needs(self, measurements: Measurements) -> dict[str, Any]:
        """Return memory and work of a step."""
        accumulation = self.config.gradient_accumulation * self.parts
        computed = {"batch_size": self.size, "gradient_accumulation": accumulation}
        config = self.config.model_copy(update=computed)
        return sum_up(measurements, config, staged=self.staged, resident=self.resident)

    def evaluated(
        self, measurements: Measurements, speed: Speed, limit: int | None
    ) -> tuple[float, Candidate, dict[str, Any]]:
        """Return (seconds of a step, the candidate, its needs); streamed, with all blocks on the device that fit."""
        needs = self.needs(measurements)
        best = speed.seconds(needs), self, needs
        if self.config.offload != "blocks" or limit is None or needs["total_bytes"] > limit:
            return best
        low, high = 0, blocks_of(measurements, self.config)
        while high - low > 1:  # the most that fit; not all: then nothing is streamed
            middle = (low + high) // 2
            more = Candidate(self.config, self.staged, self.size, middle)
            needs = more.needs(measurements)
            if needs["total_bytes"] <= limit:
                low, best = middle, (speed.seconds(needs), more, needs)
            else:
                high = middle
        return best


def blocks_of(measurements: Measurements, config: TrainConfig) -> int:
    """Return the number of the trained network's blocks that could be streamed."""
    return len(measurements.at(config).blocks.get(measurements.trained, ()))


def formats(measurements: Measurements, config: TrainConfig) -> list[str]:
    """Return the values of `quantize` that a plan may choose, from the closest to the original weights."""
    if config.quantize != "auto" or measurements.blueprint is None:
        return ["off" if config.quantize == "auto" else config.quantize]
    device = choose_device(config.device)
    denoiser = blank(measurements.blueprint, measurements.dtype(config)).denoiser
    usable = [
        name
        for name in FORMATS
        if config.qat in ("off", name)
        and not quantize_problems(denoiser, config.model_copy(update={"quantize": name}), device)
    ]
    return ["off", *sorted(usable, key=lambda name: -FORMATS[name].bytes_per_parameter)]


def candidates(
    measurements: Measurements, config: TrainConfig, split: int | None, sizes: Sequence[int] | None = None
) -> Iterator[list[Candidate]]:
    """Yield the groups; ``split``: of the resumed run, whose results may not change; ``sizes``: examples at a time."""
    whole = config.batch_size
    if sizes is None:
        sizes = [size for size in range(whole, 0, -1) if whole % size == 0] if split is None else [-(-whole // split)]
    choices = formats(measurements, config)
    yield [Candidate(config.model_copy(update={"quantize": choices[0]}), config.offload == "blocks", sizes[0])]
    images = measurements.blueprint is not None  # a language model has no encoders that could leave the device
    cached: dict[str, Any] = {"cache_latents": True} if images else {}
    if images and not config.train_text_encoders:
        cached["cache_text"] = True
    precisions = [config.precision]
    if measurements.own.itemsize == 4 and split is None:
        precisions.append("bf16")
    modes = MODES[MODES.index(config.gradient_checkpointing) :]
    if config.compile == "on" and config.gradient_checkpointing != "selective":  # the two do not go together
        modes = tuple(mode for mode in modes if mode != "selective")
    for precision in precisions:
        plain: list[dict[str, str]] = [{"gradient_checkpointing": mode} for mode in modes]
        moved: list[dict[str, str]] = [{"gradient_checkpointing": "full", "offload_activations": "on"}]
        moved = moved if config.offload_activations == "auto" else []

        def group(ways: Sequence[dict[str, str]], **changes: Any) -> list[Candidate]:
            settings = [
                cached | {"quantize": format, "precision": precision} | way | changes  # noqa: B023
                for format, way in product(choices, ways)
            ]
            staged = images or changes.get("offload", config.offload) == "blocks"
            return [Candidate(config.model_copy(update=each), staged, size) for each in settings for size in sizes]

        if config.offload != "blocks":
            yield group(plain)
            yield group(moved)
        streams = config.offload != "off" and not config.shard and config.compile != "on"
        streams = streams and blocks_of(measurements, config.model_copy(update={"quantize": choices[0]})) > 0
        if streams or config.offload == "blocks":
            yield group([*plain, *moved], offload="blocks")
        if split is None and config.optimizer == "adamw" and "optimizer" not in config.explicit_fields:
            yield group([*plain, *moved], optimizer="adamw8bit", **({"offload": "blocks"} if streams else {}))


def fits(needs: Mapping[str, Any], limit: int | None, ram: int | None) -> bool:
    """Return whether a run stays within the limits of device and host memory."""
    return (limit is None or needs["total_bytes"] <= limit) and (ram is None or needs["host_bytes"] <= ram)
