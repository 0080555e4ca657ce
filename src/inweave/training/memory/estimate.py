"""Memory: what a run will need, and staying within a limit.

    a step      = weights + 8 bytes a trained parameter (master, gradient) + optimizer + batch * what one example keeps
    caching     = weights + what the autoencoder needs for one picture
    needed      = the larger of the two + what CUDA and its libraries take

    staged      the networks are on the device one after the other: autoencoder, text encoders, then the denoiser

What one example keeps is measured on the meta device (`inweave.training.memory.meta`). A plan changes as little as it can, in the
order of what it costs: staging, smaller batches with as many pictures an update, computing again, and last the
precision, the only one that changes numbers. What fits in no way is an error that says what would help.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from inweave.errors import MemoryBudgetError
from inweave.models.blueprint import Blueprint
from inweave.models.families.base import ENCODERS
from inweave.models.model import Model
from inweave.ops.device import DTYPES
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.meta import Measured, measure
from inweave.training.tasks.diffusion import trained_networks

CONTEXT = 768 << 20  # what CUDA takes beside the allocator: its context and kernels; 758 MiB on an H200
RESERVE = CONTEXT + (256 << 20)  # and in the allocator, beside what a step keeps: what cuBLAS and cuDNN work with
MODES = ("off", "selective", "full")
GIB = 1 << 30

#: how many times the work of a forward pass a step is: frozen weights need no gradients of their own
_PASSES = {"off": 2.0, "selective": 2.3, "full": 3.0}
_SHARE_OF_PEAK = 0.4  # what small and uneven operations leave of the speed of large products
_STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.03, "prodigy": 16.0, "schedulefree": 8.0, "adafactor": 4.0}


@dataclass(frozen=True, slots=True)
class Words:
    """A language model, in place of a blueprint: how it is loaded, and how one example of it is measured."""

    dtype: torch.dtype
    measured: Callable[[TrainConfig, torch.dtype, Callable[[Mapping[str, nn.Module]], None]], Measured]


Sized = Model | Blueprint | Words


@dataclass(frozen=True, slots=True)
class Plan:
    """``config`` with ``changes`` made, why, and what it then needs; ``staged``: see `DiffusionTask.prepare`."""

    config: TrainConfig
    changes: Mapping[str, Any]
    reasons: tuple[str, ...]
    estimate: Mapping[str, Any]
    staged: bool
    limit: int


def estimate(
    model: Sized,
    config: TrainConfig,
    steps: int = 0,
    *,
    staged: bool = False,
    side: int | None = None,
    chunks: int = 1,
) -> dict[str, Any]:
    """Bytes by kind, and their sum at the highest moment of the run; ``side``, ``chunks``: see `plan`."""
    return _added(_Sizes(model, config, side, chunks), config, staged=staged) | {"steps": steps}


def plan(
    model: Sized,
    config: TrainConfig,
    limit_bytes: int,
    *,
    same_numbers: bool = False,
    side: int | None = None,
    chunks: int = 1,
) -> Plan:
    """The configuration that stays within a limit and differs least from the one given.

    ``same_numbers``: nothing that changes a result, since a run that has begun goes on.
    ``side``: of the largest pictures, where the dataset has others than the configuration says.
    ``chunks``: of the text encoder that the longest caption takes.
    """
    sizes = _Sizes(model, config, side, chunks)
    wanted = _added(sizes, config, staged=False)
    least = None
    for chosen, staged in _ways(sizes, config, same_numbers):
        needs = _added(sizes, chosen, staged=staged)
        if needs["total_bytes"] <= limit_bytes:
            changes = {
                n: getattr(chosen, n) for n in TrainConfig.model_fields if getattr(chosen, n) != getattr(config, n)
            }
            return Plan(
                chosen,
                changes,
                tuple(_reasons(config, chosen, wanted, needs, limit_bytes, staged)),
                needs,
                staged,
                limit_bytes,
            )
        least = needs if least is None or needs["total_bytes"] < least["total_bytes"] else least
    assert least is not None
    raise MemoryBudgetError(_refusal(config, least, limit_bytes, pictures=sizes.blueprint is not None))


def limit_for(config: TrainConfig, device: torch.device) -> int | None:
    """The bytes a run may use: those of `vram`, what is free where it says "auto", or None without a limit."""
    if config.vram != "auto":
        return config.vram_bytes
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def enforce(limit_bytes: int, device: torch.device) -> None:
    """Beyond the limit an allocation fails, instead of taking what belongs to others; until `lift`."""
    if device.type == "cuda":
        gc.collect()  # what earlier runs of this process left counts too
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        share = max(limit_bytes - CONTEXT, 0) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), _number(device))


def lift(device: torch.device) -> None:
    """No limit any more: the process goes on after the run."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, _number(device))


def _number(device: torch.device) -> int:
    """Which GPU; the call above takes no device that does not say."""
    return torch.cuda.current_device() if device.index is None else device.index


def seconds_for(work: float, device: torch.device, dtype: torch.dtype) -> float:
    """About how long so many additions and multiplications take on a device, from a product timed on it."""
    side = 8192 if device.type == "cuda" else 768
    factor = torch.randn(side, side, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        factor @ factor
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return work * best / (2 * side**3 * _SHARE_OF_PEAK)


class _Sizes:
    """Measurements of one model, each made when it is first asked for."""

    def __init__(self, model: Sized, config: TrainConfig, side: int | None = None, chunks: int = 1) -> None:
        self._words = model if isinstance(model, Words) else None
        self.blueprint = model.blueprint if isinstance(model, Model) else None if isinstance(model, Words) else model
        known = None if isinstance(model, Blueprint) else model.dtype
        self.own = known or DTYPES.get(config.precision, torch.bfloat16)
        self._config, self._side, self._chunks = config, side, chunks
        self._found: dict[tuple[torch.dtype, str], Measured] = {}

    def dtype(self, config: TrainConfig) -> torch.dtype:
        """As loaded, until a plan says otherwise."""
        return self.own if config.precision == self._config.precision else DTYPES[config.precision]

    def at(self, config: TrainConfig) -> Measured:
        key = self.dtype(config), config.gradient_checkpointing
        if key not in self._found:
            switch = partial(apply_checkpointing, mode=config.gradient_checkpointing)
            if self._words is not None:
                self._found[key] = self._words.measured(config, key[0], switch)
                return self._found[key]
            assert self.blueprint is not None
            shown = config if self._side is None else config.model_copy(update={"resolution": self._side})
            again = config.gradient_checkpointing == "full"
            self._found[key] = measure(
                self.blueprint, shown, key[0], switch, trained_networks, again=again, chunks=self._chunks
            )
        return self._found[key]


def _added(sizes: _Sizes, config: TrainConfig, *, staged: bool) -> dict[str, Any]:
    found = sizes.at(config)
    weights, learnt = found.weights, found.parameters
    encoders = sum(weights.get(folder, 0) for folder in ENCODERS)
    working = sum(weights.values())
    if staged:
        assert sizes.blueprint is not None
        frozen = sum(weights.get(folder, 0) for folder in sizes.blueprint.family.frozen_encoders)
        needed = encoders - frozen if config.train_text_encoders else 0
        needed += 0 if config.cache_text or config.train_text_encoders else encoders
        working = weights[sizes.blueprint.denoiser.folder] + needed + (0 if config.cache_latents else weights["vae"])
    trained = int(learnt * (8 + _STATE_BYTES[config.optimizer]) + (4 * learnt if config.ema_decay else 0))
    kept = found.kept * config.batch_size
    vae = (weights["vae"] if staged else sum(weights.values())) + found.encoding
    caching = max(vae, encoders if staged else 0)
    training = working + trained + kept + (0 if config.cache_latents else found.encoding)
    return {
        "weights_bytes": working,
        "trained_parameters": learnt,
        "trained_bytes": trained,
        "kept_bytes": kept,
        "caching_bytes": caching,
        "reserved_bytes": RESERVE,
        "work_per_step": int(
            found.work * _PASSES[config.gradient_checkpointing] * config.batch_size * config.gradient_accumulation
        ),
        "total_bytes": max(training, caching) + RESERVE,
    }


def _ways(sizes: _Sizes, config: TrainConfig, same_numbers: bool) -> Iterator[tuple[TrainConfig, bool]]:
    """Configurations from the one given to the smallest, in the order they are tried."""
    yield config, False
    staged = sizes.blueprint is not None  # a language model has nothing that could leave
    cached: dict[str, Any] = {"cache_latents": True} if staged else {}
    if staged and not config.train_text_encoders:
        cached["cache_text"] = True
    precisions = [config.precision]
    if sizes.own == torch.float32 and not same_numbers:
        precisions.append("bf16")
    for precision in precisions:
        for mode in MODES[MODES.index(config.gradient_checkpointing) :]:
            for size in range(config.batch_size, config.batch_size - 1 if same_numbers else 0, -1):
                if config.batch_size % size == 0:
                    split = {
                        "batch_size": size,
                        "gradient_accumulation": config.gradient_accumulation * (config.batch_size // size),
                    }
                    told = cached | split | {"gradient_checkpointing": mode, "precision": precision}
                    yield config.model_copy(update=told), staged


def _reasons(
    before: TrainConfig,
    after: TrainConfig,
    wanted: Mapping[str, Any],
    needs: Mapping[str, Any],
    limit: int,
    staged: bool,
) -> Iterator[str]:
    """One line a decision, for people."""
    if not staged and after == before:
        yield f"nothing has to change: {_gib(needs['total_bytes'])} of {_gib(limit)} are needed"
        return
    yield f"as configured {_gib(wanted['total_bytes'])} would be needed, and there are {_gib(limit)}"
    if staged:
        yield (
            "pictures and captions are encoded first, and their encoders leave the device: "
            f"{_gib(wanted['weights_bytes'] - needs['weights_bytes'])} of weights less"
        )
    if after.batch_size != before.batch_size:
        yield (
            f"batch_size {before.batch_size} becomes {after.batch_size} and gradient_accumulation {after.gradient_accumulation}: "
            "as many examples an update, fewer at once"
        )
    if after.gradient_checkpointing != before.gradient_checkpointing:
        yield f'gradient_checkpointing "{after.gradient_checkpointing}": a step keeps {_gib(needs["kept_bytes"])}, and takes longer'
    if after.precision != before.precision:
        yield f"precision {after.precision}: half the bytes a number; this changes results slightly"
    yield f"so {_gib(needs['total_bytes'])} are needed"


def _refusal(config: TrainConfig, least: Mapping[str, Any], limit: int, *, pictures: bool) -> str:
    parts = {name: least[f"{name}_bytes"] for name in ("weights", "trained", "kept")}
    told = ", ".join(f"{name} {_gib(size)}" for name, size in {**parts, "CUDA and its libraries": RESERVE}.items())
    advice = []
    if limit <= RESERVE:
        advice.append("CUDA and its libraries alone take more: a larger limit is the only way")
    elif parts["weights"] + RESERVE > limit:
        advice.append("the weights alone are too large: another model, or a larger limit, is the only way")
    else:
        if parts["kept"] > GIB // 8 or least["caching_bytes"] + RESERVE > limit:
            advice.append("lower resolution" if pictures else "cut the texts into shorter ones")
        if parts["trained"] > GIB // 8:
            smaller = "" if config.optimizer == "adamw8bit" else ', or set optimizer = "adamw8bit"'
            advice.append(f"lower rank{smaller}")
        if config.train_text_encoders:
            advice.append("set train_text_encoders = false")
        advice.append("raise the limit (vram)")
    return (
        f"vram: {_gib(limit)} are not enough; with batches of one, gradient checkpointing and every encoder put away it takes "
        f"{_gib(least['total_bytes'])} ({told}); " + "; ".join(advice)
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
