"""The time that unmerged LoRAs add to a forward pass of a denoiser.

    base      the network without LoRAs
    1, 3      this number of LoRAs on the attention projections, in the dtype of the network
              peer: PEFT's layers through diffusers' add_adapter and set_adapters, with the same weights
    eager     calls from Python: on a fast GPU mostly host time
    graph     the same kernels recorded as a CUDA graph and replayed: GPU time
    times     the row's time over that of the base, of the same kind

The limit is the arithmetic of the base at the rate of a large product. Outputs are compared with the peer's.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inweave.bench.models import random_batch, random_model
from inweave.bench.operations import forward_operations
from inweave.bench.report import BenchRow
from inweave.bench.step import PEER, fresh_memory
from inweave.bench.timing import Rates, Work, capture, wall_seconds
from inweave.layers import eject, inject, lora_layers
from inweave.training.adapters.targets import select_modules
from inweave.training.config.schema import TrainConfig

COUNTS = (1, 3)
#: relative mean difference allowed between two ways of rounding to half precision; a missing LoRA exceeds it
SAME_OUTPUT = 0.1


@dataclass(frozen=True, slots=True)
class ForwardCase:
    """A model, and the batch, image size and rank of its forward pass."""

    model: str
    batch: int = 2
    rank: int = 32
    size: int = 1024

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.size} pixels"


class ForwardBench:
    """A random denoiser and its inputs on the device."""

    def __init__(self, case: ForwardCase, device: torch.device, dtype: torch.dtype, runs: int) -> None:
        self.case, self.device, self.dtype, self.runs = case, device, dtype, runs
        self.model = random_model(case.model, device, dtype)
        self.network: Any = self.model.denoiser.eval().requires_grad_(False)
        self.modules = select_modules("unet", self.network, TrainConfig.of(dataset="-", targets="attention"))
        family, inputs = self.model.family, random_batch(self.model, case.batch, case.size)
        text = {name.removeprefix("text."): value for name, value in inputs.items() if name.startswith("text.")}
        latents = inputs["latents"].to(dtype)
        conditioning = family.batch_inputs(self.model, text, inputs["sizes"], latents.shape, 1.0)

        @torch.inference_mode()
        def forward() -> torch.Tensor:
            return family.denoise(self.model, latents, inputs["times"], conditioning)

        self.forward: Callable[[], torch.Tensor] = forward

    def milliseconds(self) -> dict[str, float]:
        """Measure a forward pass of the network in its current state: eager, and on a GPU as a graph."""

        def median(work: Work) -> float:
            return statistics.median(wall_seconds(work, self.device, runs=self.runs, warmup=3)) * 1e3

        figures = {"eager": median(self.forward)}
        if self.device.type == "cuda":
            graph = capture(self.forward, self.device)
            figures["CUDA graph"] = median(graph.replay)
        return figures

    @torch.no_grad()
    def add_lora(self, number: int) -> None:
        """Add a LoRA with random values in both factors."""
        name = f"lora{number}"
        inject(self.network, self.case.rank, None, self.modules, name=name, seed=number, dtype=self.dtype)
        for layer in lora_layers(self.network).values():
            layer.branch(name).roles()["up"].normal_(std=0.3 * self.case.rank**-0.5)

    def factors(self) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Return (down, up) of every LoRA by module."""
        layers = lora_layers(self.network)
        loras: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
        for name in next(iter(layers.values())).adapters:
            roles = {module: layer.branch(name).roles() for module, layer in layers.items()}
            loras.append({module: (each["down"].detach(), each["up"].detach()) for module, each in roles.items()})
        return loras

    @torch.no_grad()
    def add_peer(self, number: int, factors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add PEFT layers with these factors, and activate all of them."""
        from peft import LoraConfig

        rank = self.case.rank
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(self.modules), init_lora_weights=False)
        name = f"lora{number}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an existing adapter
            self.network.add_adapter(config, adapter_name=name)
        for module, (down, up) in factors.items():
            layer = self.network.get_submodule(module)
            for role, value in (("lora_A", down), ("lora_B", up)):
                weight = getattr(layer, role)[name].weight
                weight.data = value.to(self.dtype)
        self.network.set_adapters([f"lora{each}" for each in range(number + 1)])
        self.network.eval().requires_grad_(False)


def measure_forward(
    case: ForwardCase,
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    runs: int = 15,
    counts: Sequence[int] = COUNTS,
    peers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return rows in milliseconds, and notes."""
    report = progress or (lambda text: None)
    with fresh_memory(device):
        report(f"{case.name}: the base")
        bench = ForwardBench(case, device, dtype, runs)
        ours = {0: bench.milliseconds()}
        outputs: dict[int, torch.Tensor] = {}
        for number in range(max(counts)):
            bench.add_lora(number)
            if number + 1 in counts:
                report(f"{case.name}: {_loras(number + 1)}")
                outputs[number + 1] = bench.forward()
                ours[number + 1] = bench.milliseconds()
        loras = bench.factors()
        eject(bench.network)
        theirs, notes = _peer_figures(bench, loras, outputs, report) if peers else ({}, [])
        layers = len(bench.modules)
    limit = rates.seconds(forward_operations(case.model, case.batch, case.size, dtype), 0) * 1e3
    rows = []
    for kind, base in ours[0].items():
        for count, figures in ours.items():
            title = "base" if count == 0 else _loras(count)
            compared = {PEER: theirs[count][kind]} if count in theirs else {}
            details = {"times the base": figures[kind] / base} if count else {}
            rows.append(BenchRow(f"{case.name}: {title}, {kind}", "ms", figures[kind], compared, limit, details))
    return rows, [*notes, f"every LoRA: rank {case.rank} on {layers} linear layers of attention"]


def _loras(count: int) -> str:
    return f"{count} unmerged LoRA{'s' if count > 1 else ''}"


def _peer_figures(
    bench: ForwardBench,
    loras: list[dict[str, tuple[torch.Tensor, torch.Tensor]]],
    outputs: dict[int, torch.Tensor],
    report: Callable[[str], None],
) -> tuple[dict[int, dict[str, float]], list[str]]:
    figures: dict[int, dict[str, float]] = {}
    notes: list[str] = []
    try:
        for number, factors in enumerate(loras):
            bench.add_peer(number, factors)
            if (count := number + 1) not in outputs:
                continue
            report(f"{bench.case.name}: {_loras(count)}, {PEER}")
            expected = bench.forward().float()
            off = float((outputs[count].float() - expected).abs().mean() / expected.abs().mean())
            if not off <= SAME_OUTPUT:
                notes.append(f"{PEER}, {_loras(count)}: not the same work: outputs differ by {off:.1%}")
            figures[count] = bench.milliseconds()
    except Exception as error:  # a peer that fails is a result too, and ours is measured already
        notes.append(f"{PEER}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return figures, notes
