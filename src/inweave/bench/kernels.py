"""Kernels by themselves, each beside plain torch on the same tensors.

    lora backward   grad_x = s (g up) down,  grad_down = s (g up)^T x,  grad_up = s g^T (x down^T)     (`inweave.ops.linear`)
                    peer: five products of torch
    merge           out = base + s up down for every attention weight of a model in one launch         (`inweave.ops.merge`)
                    peer: one addmm per weight

On a GPU a figure is the median over replays of a CUDA graph with many copies, and the eager call stands beside it: at small
sizes that one is the time of the host. On the CPU there is only the call. Errors are the largest difference from float64 in
parts of the largest number there. ``tiny``: the same rows at sizes for a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inweave.bench.report import Row
from inweave.bench.timing import Rates, captured_seconds, per_call_seconds
from inweave.errors import ConfigError
from inweave.ops.merge import Product, Target, merge_products
from inweave.targets.bases import known_index

Tensors = tuple[torch.Tensor, ...]
#: (batch, tokens, width, rank)
LORA_SHAPES = ((1, 77, 768, 16), (1, 256, 1536, 32), (1, 256, 3072, 64), (1, 4608, 3072, 16))
TINY_SHAPES = ((1, 7, 24, 2), (1, 16, 48, 4), (1, 16, 96, 8), (2, 33, 96, 2))
MERGE_RANK = 32


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on fixed tensors: what is called, what it is compared with, and what it cannot do without.

    ``outputs`` and ``exact`` return the same tensors, the second in float64; ``traffic``: bytes read and written once.
    """

    name: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    operations: float
    traffic: float
    outputs: Mapping[str, Callable[[], Tensors]] = field(default_factory=dict)
    exact: Callable[[], Tensors] | None = None


def lora_backward(
    grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> Tensors:
    grad, rows = grad_out.flatten(0, -2), x.flatten(0, -2)
    hidden = grad @ up * scale
    return (hidden @ down).view_as(x), hidden.t() @ rows, grad.t() @ (rows @ down.t()) * scale


def five_products(grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> Tensors:
    """The gradients at a scale of 1: what is not multiplied by the scale needs no launch for it."""
    grad, rows = grad_out.flatten(0, -2), x.flatten(0, -2)
    hidden = grad @ up
    return (hidden @ down).view_as(x), hidden.t() @ rows, grad.t() @ (rows @ down.t())


def lora_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    for shape in TINY_SHAPES if tiny else LORA_SHAPES:
        yield lora_case(*shape, device, dtype)


def lora_case(batch: int, tokens: int, width: int, rank: int, device: torch.device, dtype: torch.dtype) -> KernelCase:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x, grad = random(batch, tokens, width).to(dtype), random(batch, tokens, width).to(dtype)
    down, up = (random(rank, width) / width**0.5).to(dtype), (random(width, rank) / rank**0.5).to(dtype)
    rows = batch * tokens

    def halved(*tensors: torch.Tensor) -> Tensors:
        return tuple(0.5 * each for each in tensors)

    return KernelCase(
        f"LoRA backward {batch} x {tokens} x {width}, rank {rank}",
        lambda: lora_backward(grad, x, down, up, 1.0),
        {"torch": lambda: five_products(grad, x, down, up)},
        operations=10 * rows * rank * width,
        traffic=(3 * rows * width + 4 * rank * width) * x.element_size(),
        outputs={
            "inweave": lambda: lora_backward(grad, x, down, up, 0.5),
            "torch": lambda: halved(*five_products(grad, x, down, up)),
        },
        exact=lambda: halved(*five_products(grad.double(), x.double(), down.double(), up.double())),
    )


def merge_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    rank = 4 if tiny else MERGE_RANK
    shapes = [(48, 24), (96, 48)] * 3 if tiny else [
        (shape[0], shape[1])
        for name, shape in known_index("sdxl").components["unet"].shapes.items()
        if ".attn" in name and name.endswith(".weight") and len(shape) == 2
    ]  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).mul_(0.02).to(dtype)

    targets = [
        Target(
            base := random(*shape),
            torch.empty_like(base),
            (Product(random(shape[0], rank), random(rank, shape[1]), 0.8),),
        )
        for shape in shapes
    ]
    size = sum(target.base.numel() for target in targets)
    factors = sum(rank * (shape[0] + shape[1]) for shape in shapes)

    def run() -> None:
        merge_products(targets)

    def addmm() -> list[torch.Tensor]:
        return [
            torch.addmm(target.base, each.up, each.down, alpha=each.scale, out=target.out)
            for target in targets
            for each in target.products
        ]

    def ours() -> Tensors:
        run()
        return tuple(target.out.clone() for target in targets)

    yield KernelCase(
        f"merge of rank {rank} into {len(targets)} weights, {size / 1e6:.3g} M numbers",
        prepared_merge(targets) if device.type == "cuda" else run,
        {"torch": addmm},
        operations=2 * rank * size,
        traffic=(2 * size + factors) * targets[0].base.element_size(),
        outputs={"inweave": ours, "torch": lambda: tuple(addmm())},
        exact=lambda: tuple(
            t.base.double() + 0.8 * (t.products[0].up.double() @ t.products[0].down.double()) for t in targets
        ),
    )


def prepared_merge(targets: Sequence[Target]) -> Callable[[], object]:
    """A launch that is ready: its tables are on the device, as a weaver keeps them."""
    from inweave.ops.merge.dispatch import prepared

    return prepared(targets).run


GROUPS: Mapping[str, Callable[..., Iterator[KernelCase]]] = {"lora": lora_cases, "merge": merge_cases}
#: work that synchronizes with the host, to read what it found, cannot be recorded
_EAGER_ONLY = ("merge",)


def measure_kernels(
    groups: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    tiny: bool = False,
    replays: int = 200,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """A row per kernel and size of these groups, in microseconds."""
    if unknown := [group for group in groups if group not in GROUPS]:
        raise ConfigError(f"no kernels are called {unknown[0]!r}; known are {', '.join(GROUPS)}")
    rows = []
    for group in groups:
        for case in GROUPS[group](device, dtype, tiny=tiny):
            if progress is not None:
                progress(case.name)
            rows.append(
                _measure(
                    case, device, rates, captured=device.type == "cuda" and group not in _EAGER_ONLY, replays=replays
                )
            )
    return rows


def _measure(case: KernelCase, device: torch.device, rates: Rates, *, captured: bool, replays: int) -> Row:
    def micros(work: Callable[[], object]) -> float:
        seconds = captured_seconds(work, device, replays=replays) if captured else per_call_seconds(work, device)
        return seconds * 1e6

    details: dict[str, float | str] = {}
    if captured:
        details["eager"] = per_call_seconds(case.ours, device) * 1e6
        details |= {f"{name}, eager": per_call_seconds(work, device) * 1e6 for name, work in case.peers.items()}
    if case.exact is not None:
        exact = case.exact()
        for name, outputs in case.outputs.items():
            details["error" if name == "inweave" else f"{name}, error"] = largest_error(outputs(), exact)
    limit = rates.seconds(case.operations, case.traffic) * 1e6
    return Row(
        case.name, "µs", micros(case.ours), {name: micros(work) for name, work in case.peers.items()}, limit, details
    )


def largest_error(values: Tensors, exact: Tensors) -> float:
    """The largest difference in parts of the largest exact number of the same tensor."""
    return max(float((v.double() - e).abs().max() / e.abs().max()) for v, e in zip(values, exact, strict=True))
