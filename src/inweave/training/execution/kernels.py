"""The kernels of the libraries while a step is computed.

    attention     the fastest kernel for each shape (`inweave.ops.attention`); shapes it does not support use torch's
                  kernels except cuDNN, whose backward pass reads out of bounds if layouts differ; with `deterministic`,
                  torch's plain formula, since the backward passes of its kernels add in any order
    convolutions  with `deterministic`, kernels that add in a fixed order

Only GPUs are affected. The choices for attention belong to the run: a checkpoint stores them, and a resumed run keeps
them, even if this machine has measured others since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inweave.ops.attention import ALL, MeasuredAttention, frontend_problem, machine_name
from inweave.ops.common.select import is_nvidia

_FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def step_kernels(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Enter the context in which forward passes, recomputed ones too, and their backward passes run."""
    if not is_nvidia(device):
        yield
        return
    before, cudnn.deterministic = cudnn.deterministic, deterministic or cudnn.deterministic
    try:
        with (
            sdpa_kernel([SDPBackend.MATH] if deterministic else _FAST),
            MeasuredAttention(deterministic=deterministic),
        ):
            yield
    finally:
        cudnn.deterministic = before


def deterministic_hints(dtype: torch.dtype) -> list[str]:
    """Return hints on making a deterministic run on a GPU faster; ``dtype``: of its activations."""
    if dtype == torch.float32 or torch.version.hip is not None or (problem := frontend_problem()) is None:
        return []
    return [
        "deterministic = true: the backward pass of attention takes 2-3x as long in a fixed order, and 1.1-1.7x with "
        f"cuDNN's Python package, but {problem}"
    ]


def attention_to_keep(
    recorded: Mapping[str, str], device: torch.device, *, deterministic: bool
) -> tuple[dict[str, str], list[str]]:
    """Return (the ``recorded`` attention choices of a checkpoint that the resumed run keeps, notes for the log)."""
    choices = {key: name for key, name in recorded.items() if name in ALL}
    machines, here = {key.partition(": ")[0] for key in choices}, machine_name(device, deterministic)
    before = "attention of the steps that are done was computed"
    rounding = "results differ from a straight run by rounding"
    notes = []
    if unknown := sorted({*recorded.values()} - ALL.keys()):
        notes.append(f"{before} by kernels that are not in this version ({', '.join(unknown)}): {rounding}")
    if machines and here not in machines:
        notes.append(f"{before} on {' and '.join(sorted(machines))}, and this is {here}: {rounding}")
    return choices, notes
