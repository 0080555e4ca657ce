"""One training loop for all stages: AdamW, warm-up and cosine, gradients clipped, an average of the weights kept.

    pace(f)     min(1, f / 0.02) * (1 + cos(pi * max(0, f - 0.3) / 0.7)) / 2      f: fraction of the stage that is done
    average     <- d * average + (1 - d) * weights,   d = min(decay, (1 + step) / (10 + step))

A stage ends after a number of steps or a number of seconds; f counts whichever was given.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a stage: ``steps`` if it is not 0, else ``seconds``."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with a learning rate of their own."""

    parameters: list[nn.Parameter]
    learning_rate: float


def pace(done: float) -> float:
    return min(1.0, done / 0.02) * (0.5 + 0.5 * math.cos(math.pi * max(0.0, min(done, 1.0) - 0.3) / 0.7))


def fit(
    name: str,
    groups: Sequence[Group],
    loss_of_a_batch: Callable[[], torch.Tensor],
    length: Length,
    *,
    decay: float = 0.999,
    weight_decay: float = 0.0,
    report_every: int = 250,
) -> int:
    """Train ``groups`` and leave the averaged weights in them; returns the number of steps."""
    parameters = [parameter for group in groups for parameter in group.parameters]
    optimizer = torch.optim.AdamW(
        [{"params": group.parameters, "lr": group.learning_rate} for group in groups],
        betas=(0.9, 0.99),
        weight_decay=weight_decay,
        fused=parameters[0].is_cuda,
    )
    average = [parameter.detach().clone() for parameter in parameters]
    start, step = time.monotonic(), 0
    while (done := step / length.steps if length.steps else (time.monotonic() - start) / length.seconds) < 1:
        for settings, group in zip(optimizer.param_groups, groups, strict=True):
            settings["lr"] = group.learning_rate * pace(max(done, 1e-4))
        loss = loss_of_a_batch()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ema_decay = min(decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1 - ema_decay)
        step += 1
        if step in (1, 10, 50) or step % report_every == 0:
            spent = time.monotonic() - start
            print(f"{name} step {step} ({done:.0%}) loss {loss.item():.4f}, {step / spent:.2f} steps/s", flush=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)
    print(f"{name}: {step} steps in {time.monotonic() - start:.0f} s", flush=True)
    return step


def add_training(parser: argparse.ArgumentParser, *, seconds: float, batch: int) -> None:
    parser.add_argument("--steps", type=int, default=0, help="train this many steps (0: by time)")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"train this long (default: {seconds:g})")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--limit", type=int, default=0, help="use only this many images of a set (0: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the training step")


def prepare(options: argparse.Namespace) -> torch.device:
    """Seed everything and choose the fast paths of a GPU."""
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device(options.device)


def mixed(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on a GPU, in float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
