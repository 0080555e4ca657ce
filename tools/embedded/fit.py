"""One training loop for all stages: AdamW, warm-up and cosine, gradients clipped, an average of the weights kept.

    pace(f)     min(1, f / 0.02) * (1 + cos(pi * max(0, f - 0.4) / 0.6)) / 2      f: fraction of the stage that is done
    average     <- d * average + (1 - d) * weights,   d = min(decay, (1 + step) / (10 + step))

A stage ends after a number of steps or a number of seconds; f counts whichever was given. It stops earlier at the
leg's deadline, and leaves its state: weights, their average, both moments, the step, the seconds spent. Everything
random in a step comes from generators seeded with the run's seed, the stage and the step, so a run by steps that is
stopped and resumed makes the same numbers as one that is not.

On a GPU a step (forward, backward, clipping, AdamW, average) is one CUDA graph, after three steps without it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
_WARM = 3
_RAMP = 100


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
    return min(1.0, done / 0.02) * (0.5 + 0.5 * math.cos(math.pi * max(0.0, min(done, 1.0) - 0.4) / 0.6))


def generator_of(device: torch.device, seed: int, stage: str, step: int) -> torch.Generator:
    """Return the random numbers of one step of one stage."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{stage}/{step}".encode()))


class Fit:
    """A stage in training: its optimizer, its average, its state on disk."""

    def __init__(
        self,
        name: str,
        groups: Sequence[Group],
        loss: Callable[[Batch], Tensor],
        state: Path,
        *,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        graph: bool = True,
    ) -> None:
        self.name, self.groups, self.loss, self.state, self.decay = name, groups, loss, state, decay
        self.parameters = [parameter for group in groups for parameter in group.parameters]
        self.device = self.parameters[0].device
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": group.parameters, "lr": torch.zeros((), device=self.device)} for group in groups],
            betas=(0.9, 0.99), weight_decay=weight_decay, fused=on_gpu or None, capturable=on_gpu,
            foreach=None if on_gpu else False,
        )  # fmt: skip
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.toward = torch.zeros((), device=self.device)
        self.steps, self.spent = 0, 0.0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wants_graph = graph and on_gpu
        self._inputs: dict[str, Tensor] = {}
        self._loss = torch.zeros((), device=self.device)
        self._ramp_from = -1
        if state.exists():
            self._load()

    def restart(self, steps: int, spent: float) -> None:
        """Go on from the weights that the networks have, without the rest of a state: rates rise again at first."""
        if self.steps == 0:
            self.steps, self.spent, self._ramp_from = steps, spent, steps

    def run(
        self, batch: Callable[[int], Batch], length: Length, deadline: float = math.inf, most: int = 0, every: int = 250
    ) -> bool:
        """Train until the stage is done; return whether it is.

        It ends earlier at the deadline (of `time.monotonic`), or after ``most`` steps if that is not 0.
        """
        started, before, first = time.monotonic(), self.spent, self.steps
        while (done := self._done(length)) < 1 and time.monotonic() < deadline:
            if most and self.steps - first == most:
                break
            for settings, group in zip(self.optimizer.param_groups, self.groups, strict=True):
                settings["lr"].fill_(group.learning_rate * pace(max(done, 1e-4)) * self._ramp())
            self.toward.fill_(1 - min(self.decay, (1 + self.steps) / (10 + self.steps)))
            self._step(batch(self.steps), self.steps - first)
            self.steps += 1
            if self._wants_graph and self.steps % 8 == 0:
                torch.cuda.synchronize()  # else the clock runs ahead of the GPU
            if self.steps in (1, 10, 50) or self.steps % every == 0:
                loss = self._loss.item()  # waits for the GPU: the time below is that of finished steps
                spent = time.monotonic() - started
                rate = (self.steps - first) / spent
                print(f"{self.name} step {self.steps} ({done:.0%}) loss {loss:.4f}, {rate:.2f} steps/s", flush=True)
                if not math.isfinite(loss):
                    raise SystemExit(f"{self.name}: the loss is {loss} at step {self.steps}; lower the learning rates")
            self.spent = before + time.monotonic() - started
        self.save()
        is_done = self._done(length) >= 1
        print(
            f"{self.name}: {self.steps} steps, {self.spent:.0f} s, {'done' if is_done else 'to be resumed'}", flush=True
        )
        return is_done

    def take_average(self) -> None:
        """Put the averaged weights in the networks, for use; the state on disk keeps the others."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.average, strict=True):
                parameter.copy_(value)

    def save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for i, (parameter, average) in enumerate(zip(self.parameters, self.average, strict=True)):
            kept_rows = self.optimizer.state.get(parameter, {})
            tensors |= {f"{i}.weight": parameter.detach(), f"{i}.average": average}
            tensors |= {f"{i}.{name}": value for name, value in kept_rows.items() if isinstance(value, Tensor)}
        self.state.parent.mkdir(parents=True, exist_ok=True)
        partial = self.state.with_suffix(".partial")
        facts = {"steps": self.steps, "seconds": self.spent}
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial, {"facts": json.dumps(facts)})
        partial.replace(self.state)

    def _load(self) -> None:
        from safetensors import safe_open

        with safe_open(self.state, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
        tensors = load_file(self.state)
        with torch.no_grad():
            for i, (parameter, average) in enumerate(zip(self.parameters, self.average, strict=True)):
                parameter.copy_(tensors[f"{i}.weight"])
                average.copy_(tensors[f"{i}.average"])
                if f"{i}.step" in tensors:
                    step = tensors[f"{i}.step"]
                    moments = {name: tensors[f"{i}.{name}"].to(self.device) for name in ("exp_avg", "exp_avg_sq")}
                    moments = {name: torch.empty_like(parameter).copy_(value) for name, value in moments.items()}
                    on_device = self.device.type == "cuda"
                    self.optimizer.state[parameter] = {"step": step.to(self.device) if on_device else step, **moments}
        self.steps, self.spent = int(facts["steps"]), float(facts["seconds"])
        print(f"{self.name}: resumed at step {self.steps}, after {self.spent:.0f} s", flush=True)

    def _ramp(self) -> float:
        return 1.0 if self._ramp_from < 0 else min(1.0, (self.steps - self._ramp_from + 1) / _RAMP)

    def _done(self, length: Length) -> float:
        return self.steps / length.steps if length.steps else self.spent / length.seconds

    def _step(self, batch: Batch, number: int) -> None:
        if not self._inputs:
            self._inputs = {name: value.clone() for name, value in batch.items()}
        for name, value in batch.items():
            self._inputs[name].copy_(value)
        if self._graph is not None:
            self._graph.replay()
            return
        if self._wants_graph and number == _WARM:
            self._capture()
            return
        self.optimizer.zero_grad(set_to_none=True)
        self._update()

    def _update(self) -> None:
        loss = self.loss(self._inputs)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            apart = torch._foreach_sub([parameter.detach() for parameter in self.parameters], self.average)
            torch._foreach_mul_(apart, self.toward)
            torch._foreach_add_(self.average, apart)
            self._loss.copy_(loss.detach())

    def _capture(self) -> None:
        """Record a step and run it; go on without a graph where that fails."""
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self._update()
        except RuntimeError as error:
            print(f"{self.name}: no CUDA graph: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            self._wants_graph = False
            self.optimizer.zero_grad(set_to_none=True)
            self._update()
            return
        self._graph = graph
        graph.replay()


def add_training(parser: argparse.ArgumentParser, *, batch: int) -> None:
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--limit", type=int, default=0, help="use only this many images of a set (0: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the loss")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")


def prepare(seed: int, device: str) -> torch.device:
    """Seed everything and choose the fast paths of a GPU."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device(device)


def mixed(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on a GPU, in float32 elsewhere; copies of weights are not kept, as a CUDA graph needs it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
