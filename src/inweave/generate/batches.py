"""How many images are made together: `batch` of a request, and what "auto" chooses.

    a number    at most this many
    "auto"      CPU    as many as have 1024 latents together, at most 8: 4 of the embedded model at its own 128x128
                GPU    as many as fit into free memory, at most 16
                other  one

    GPU: memory of a step = images * (peak of one call of the denoiser for one image - memory before it), measured
    by making that call; 0.8 of the free memory may be used. Only latents are kept for decoding, which is done image by
    image.

A small model's step is mostly the cost of starting its operations, which a batch shares; a large image fills the
processor alone. On two CPU cores a step of the embedded model takes 47 ms for one image of 128x128 and 33 ms per image
for four; at 192x192 a batch saves nothing.

A request is split evenly: 9 images in batches of at most 4 are 3, 3 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from inweave.errors import ConfigError, Problem
from inweave.generate.denoise import ImageTask, run_denoiser
from inweave.models.families.conditioning import Conditioning
from inweave.models.model import Model

Batch = int | Literal["auto"]
MAX_BATCH = 100
_CPU_LATENTS, _CPU_IMAGES = 1024, 8
_GPU_IMAGES = 16
_USABLE = 0.8  # of free memory: the allocator's blocks are larger than what is in them


def check_batch(batch: object) -> Batch:
    """Return a setting of the batch; raise ConfigError if it is none."""
    if batch == "auto":
        return "auto"
    if isinstance(batch, str) and batch.isdecimal():
        batch = int(batch)
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise ConfigError(Problem("batch", f"expected auto or a number of images, 1 to {MAX_BATCH}, got {batch!r}"))
    return batch


def split(count: int, most: int) -> list[range]:
    """Return the numbers of ``count`` images in batches of at most ``most``, as even as possible."""
    parts = -(-count // most)
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def largest_batch(
    model: Model, tasks: Sequence[ImageTask], batch: Batch, measured: dict[tuple[object, ...], int]
) -> int:
    """Return how many of these images, which could share a batch, are made together at most.

    ``measured``: the memory of a step for one image, by what it depends on; measurements are added.
    """
    if model.family.own_pipeline or len(tasks) == 1:
        return 1
    if batch != "auto":
        return batch
    task = tasks[0]
    most = most_images(model, (task.width, task.height))
    if model.device.type != "cuda":
        return most
    conditioning = task.conditioning.at(0, task.steps)
    key = task.width, task.height, conditioning.rows, conditioning.layout(model.family)
    if key not in measured:
        measured[key] = _step_bytes(model, task, conditioning)
    return max(1, min(most, len(tasks), int(_USABLE * _free_bytes(model.device) / measured[key])))


def most_images(model: Model, size: tuple[int, int]) -> int:
    """Return how many images of a size "auto" makes together at most, if there is memory for them."""
    if model.device.type == "cpu":
        _, _, rows, columns = model.latent_space.shape(*size)
        return max(1, min(_CPU_IMAGES, _CPU_LATENTS // (rows * columns)))
    return _GPU_IMAGES if model.device.type == "cuda" else 1


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, with what torch's allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@torch.no_grad()
def _step_bytes(model: Model, task: ImageTask, conditioning: Conditioning) -> int:
    """Return the memory that one call of the denoiser takes for one image, besides weights."""
    shape = model.latent_space.shape(task.width, task.height)
    with model.using(model.blueprint.denoiser.folder):
        latents = torch.zeros(shape, device=model.device, dtype=model.dtype)
        if model.inpaints:
            latents = torch.cat([latents, latents[:, :1], latents], 1)
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        run_denoiser(model, conditioning.expand(latents), latents.new_full((), 500.0), conditioning.inputs)
        return max(1, torch.cuda.max_memory_allocated(model.device) - before)
