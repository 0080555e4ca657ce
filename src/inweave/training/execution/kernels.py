"""Which kernels the libraries use while a step is computed.

    attention     the fastest kernel for each shape (`inweave.ops.attention`); what that cannot serve is torch's, without cuDNN, whose
                  backward pass reads out of bounds where layouts differ; with `deterministic`, torch's plain formula, since the
                  backward passes of its kernels add in any order
    convolutions  with `deterministic`, kernels that add in a fixed order

On other devices than a GPU nothing changes. The choices for attention belong to the run: a checkpoint has them, and a resumed run
keeps them, whatever this machine has stored since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inweave.ops.attention import ALL, MeasuredAttention, frontend_problem, machine_name

_FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def step_kernels(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """The context in which forward passes, recomputed ones too, and their backward passes run."""
    if device.type != "cuda":
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
    """What would make a run on a GPU with `deterministic` faster; ``dtype``: of its activations."""
    if dtype == torch.float32 or torch.version.hip is not None or (problem := frontend_problem()) is None:
        return []
    return [
        "deterministic = true: gradients of attention take two to three times as long in a fixed order; with cuDNN's Python package they "
        f"take 1.1 to 1.7 times as long, but {problem}"
    ]


def choices_to_keep(
    recorded: Mapping[str, str], device: torch.device, *, deterministic: bool
) -> tuple[dict[str, str], list[str]]:
    """(the choices for attention that a resumed run keeps, what there is to say about others); ``recorded``: its checkpoint's."""
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
