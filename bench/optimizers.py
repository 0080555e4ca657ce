"""Optimizer steps on adapters of SDXL's size compared with other libraries, and the effect of 8-bit state on a run.

    PYTHONPATH=src python3 bench/optimizers.py            milliseconds and megabytes of state, on a GPU
    PYTHONPATH=src python3 bench/optimizers.py --tune     launch shapes of the 8-bit kernel, on a GPU
    PYTHONPATH=src python3 bench/optimizers.py --quality [SEED]
                                                          the same run with each optimizer, on the CPU (6 minutes)

The lower bound of a step is its traffic: float32 AdamW reads x, g, m, v and writes x, m, v (28 bytes per parameter),
8-bit AdamW 16 bytes. "graph" is the same step replayed from a CUDA graph. For libraries, replays are compared with
steps: an optimizer that counts its steps on the host can be captured but then repeats the bias correction of one step.

Libraries get the adapter's tensors, as in normal use, and the same numbers as one flat tensor: the first shows the cost
of many launches, the second that of the kernel itself. Each is measured in a separate process, because a failed
capture can leave the GPU unusable.

    off    mean over the steps of |loss - loss of float32| / loss of float32
    drift  |x - x of float32| / |x of float32 - x at the start|, at the end
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inweave.ops.adam8bit import corrections, fresh
from inweave.training.optim.adamw import make_optimizer
from inweave.training.optim.flat import FlatParameters

SIZES = (46_500_000, 59_800_000)
WIDTHS = (640, 1280, 2048)
RANK = 32
RATE, DECAY = 1e-4, 0.01
#: replays that are compared with steps, and how far they may be from them, in learning rates
REPLAYS, REPLAY_BOUND = 5, 0.1
#: timeout in seconds for one library: most of it is compiling for six shapes
PATIENCE = 180


@dataclass(frozen=True)
class Peer:
    """A library's optimizer: the first importable of ``names``, its options; ``in_graph``: those for CUDA graphs."""

    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    in_graph: Mapping[str, Any] = field(default_factory=dict)

    def make(self, parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        errors = []
        for name in self.names:
            module, _, kind = name.rpartition(".")
            try:
                optimizer_type = getattr(importlib.import_module(module), kind)
                break
            except (ImportError, AttributeError) as error:
                errors.append(str(error))
        else:
            raise ModuleNotFoundError(errors[0])
        optimizer: torch.optim.Optimizer = optimizer_type(parameters, weight_decay=DECAY, **{**self.options, **options})
        return optimizer


PEERS = {
    "torch AdamW fused": Peer(("torch.optim.AdamW",), {"fused": True}, {"capturable": True}),
    "torchao AdamW8bit": Peer(("torchao.optim.AdamW8bit", "torchao.prototype.low_bit_optim.AdamW8bit")),
    "bitsandbytes AdamW8bit": Peer(("bitsandbytes.optim.AdamW8bit",)),
}
LAYOUTS = ("tensors", "flat")


# parameters and measurements


def parameters(total: int, device: str = "cuda") -> dict[str, nn.Parameter]:
    """Return pairs of rank 32 on the widths of SDXL's attention, about ``total`` numbers; the same on every call."""
    generator = torch.Generator(device).manual_seed(0)
    created: dict[str, nn.Parameter] = {}
    for width in itertools.cycle(WIDTHS):
        if sum(p.numel() for p in created.values()) + 2 * RANK * width > total:
            return created
        for name, shape in (("down", (RANK, width)), ("up", (width, RANK))):
            value = nn.Parameter(torch.randn(shape, generator=generator, device=device))
            value.grad = torch.randn(shape, generator=generator, device=device) * 1e-3
            created[f"{len(created) // 2}.{name}"] = value
    raise AssertionError


def one_tensor(flat: FlatParameters) -> list[nn.Parameter]:
    """Return ``flat`` as a single parameter that shares its memory; float32 values and gradients, a multiple of 256."""
    whole = nn.Parameter(flat.values)
    whole.grad = flat.grads
    return [whole]


def make_parameters(total: int, layout: str, device: str = "cuda") -> list[nn.Parameter]:
    """Return the benchmark's parameters for a library."""
    by_name = parameters(total, device)
    if layout == "tensors":
        return list(by_name.values())
    grads = {name: parameter.grad for name, parameter in by_name.items()}
    flat = FlatParameters(by_name)
    for name, (place, _) in flat.segments.items():
        flat.grads[place] = grads[name].flatten()
    return one_tensor(flat)


def milliseconds(work: Callable[[], object], steps: int = 10) -> float:
    """Return the median of five rounds on the GPU's own clock."""
    for _ in range(3):
        work()
    samples = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            work()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / steps)
    return statistics.median(samples)


def capture(work: Callable[[], object]) -> Callable[[], object]:
    """Run one step normally and capture the next one as a graph, which has not run yet."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def state_bytes(tensors: list[torch.Tensor]) -> int:
    """Count the bytes of distinct memory: a table that all entries share counts once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def peer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [part for state in optimizer.state.values() for value in state.values() for part in inner(value)]


def inner(value: object) -> list[torch.Tensor]:
    """Return the tensors of a state entry; a subclass holds its codes and scales as attributes."""
    if not isinstance(value, torch.Tensor):
        return []
    flatten = getattr(value, "__tensor_flatten__", None)
    return [value] if flatten is None else [part for name in flatten()[0] for part in inner(getattr(value, name))]


def reason(error: BaseException) -> str:
    """Return type and first line of the original error: ending a failed capture raises a second one on top of it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160]


# speed


def ours(name: str, total: int) -> list[tuple[str, float, float]]:
    by_name = parameters(total)
    flat = FlatParameters(by_name, {each: 16.0 for each in by_name if each.endswith("up")})
    flat.grads.normal_(std=1e-3)
    optimizer = make_optimizer(name, flat, weight_decay=DECAY)
    lr, one, ok = (torch.tensor(value, device="cuda") for value in (RATE, 1.0, True))

    def work() -> None:
        optimizer.step(lr, one, ok)

    state = state_bytes(list(optimizer.state().values())) / 1e6
    return [
        (f"inweave {name}", milliseconds(work), state),
        (f"inweave {name}, graph", milliseconds(capture(work)), state),
    ]


def measure(name: str, layout: str, total: int) -> dict[str, Any]:
    """Measure a library's step: milliseconds, megabytes of state, milliseconds in a graph or the reason of failure."""
    peer = PEERS[name]
    plain = peer.make(make_parameters(total, layout), lr=RATE)
    row: dict[str, Any] = {"ms": milliseconds(plain.step), "megabytes": state_bytes(peer_state(plain)) / 1e6}
    try:
        row["graph_ms"], gap = in_graph(peer, layout, total)
    except Exception as error:
        return row | {"why": f"cannot be capture: {reason(error)}"}
    if not gap <= REPLAY_BOUND:
        row["why"] = f"a replay is not a step: {REPLAYS} of them end {gap:.2g} learning rates away from {REPLAYS} steps"
    return row


def in_graph(peer: Peer, layout: str, total: int) -> tuple[float, float]:
    """Return the milliseconds of a replay, and the largest |x replayed - x stepped| / lr after as many of each."""
    stepped, replayed = make_parameters(total, layout), make_parameters(total, layout)
    one, two = (peer.make(each, lr=RATE, **peer.in_graph) for each in (stepped, replayed))
    for _ in range(1 + REPLAYS):
        one.step()
    replay = capture(two.step)
    for _ in range(REPLAYS):
        replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        gap = max(float((a - b).abs().max()) for a, b in zip(stepped, replayed, strict=True)) / RATE
    return milliseconds(replay), gap


def in_subprocess(name: str, layout: str, total: int) -> dict[str, Any]:
    """Run `measure` in a separate process."""
    command = [sys.executable, str(Path(__file__)), "--row", name, layout, str(total)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"timed out after {PATIENCE} s"}
    if done.returncode:
        return {"why": next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")[:160]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def table(total: int) -> None:
    rows: list[tuple[str, Any, Any]] = [*ours("adamw", total), *ours("adamw8bit", total)]
    torch.cuda.empty_cache()
    notes = []
    for name, layout in itertools.product(PEERS, LAYOUTS):
        label = name if layout == "tensors" else f"{name}, one tensor"
        row = in_subprocess(name, layout, total)
        rows.append((label, row.get("ms", "-"), row.get("megabytes", "-")))
        if "graph_ms" in row:
            rows.append((f"{label}, graph" + " (*)" * ("why" in row), row["graph_ms"], row["megabytes"]))
        if "why" in row:
            notes.append(f"  {label}: {row['why']}")
    print(f"\n{f'{total / 1e6:.1f} M parameters':<44}{'ms':>10}{'state MB':>12}")
    for label, *numbers in rows:
        cells = [f"{each:.3f}" if isinstance(each, float) else each for each in numbers]
        print(f"{label:<44}{cells[0]:>10}{cells[1].removesuffix('.000'):>12}")
    print("\n".join(notes))


def tune(total: int) -> None:
    from inweave.ops.adam8bit import triton as kernel

    values, grads = torch.randn(total, device="cuda"), torch.randn(total, device="cuda") * 1e-3
    moments = fresh(total, values.device)
    lr, one, ok = (torch.tensor(value, device="cuda") for value in (RATE, 1.0, True))
    inverse = corrections(torch.tensor(10, device="cuda"), 0.9, 0.999)
    for rows, warps, coarse in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 2, 3, 4)):
        if not 64 <= rows * 256 // warps <= 1024:
            continue  # fewer than 2 or more than 32 values per thread

        def work(rows: int = rows, warps: int = warps, coarse: int = coarse) -> None:
            kernel.step(
                values, grads, *moments, lr=lr, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=DECAY,
                inverse=inverse, ok=ok, grad_scale=one, rows=rows, warps=warps, coarse=coarse,
            )  # fmt: skip

        elapsed = milliseconds(work)
        print(
            f"  {rows:2d} rows, {warps} warps, coarse {coarse}: {elapsed:.3f} ms, {total * 16 / elapsed / 1e9:.2f} TB/s"
        )


# quality

STEPS, QUALITY_RATE = 80, 1e-3


class TrainingRun:
    """LoRAs of rank 8 on the embedded model's UNet, and batches: the same start and data for every optimizer."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        from inweave.models.embedded import NAME, style_folder
        from inweave.models.model import load_model
        from inweave.training.adapters.attach import attach_adapters
        from inweave.training.config.schema import TrainConfig
        from inweave.training.data.cache import TensorCache
        from inweave.training.data.reader import read_dataset
        from inweave.training.tasks.base import generators_for
        from inweave.training.tasks.diffusion import DiffusionTask

        config = TrainConfig.of(
            model=NAME, dataset=str(style_folder("pixel")), output=str(folder), resolution=64, seed=seed
        ).with_preset(NAME)
        model = load_model(NAME, device="cpu", dtype="fp32", keep="file")
        self.task = DiffusionTask(model, read_dataset(config.dataset), config, TensorCache(folder))
        self.flat = FlatParameters(attach_adapters(self.task.networks, config).parameters)
        self.start = self.flat.values.clone()
        positions = [self.task.order.step_positions(number)[0] for number in range(steps)]
        self.batches = [
            self.task.sample_batch(tuple(example for _, example, _ in batch), generators_for(seed, batch))
            for batch in positions
        ]

    def train(self, step: Callable[[], object]) -> tuple[list[float], torch.Tensor]:
        """Return the loss before each step, and the values after the last one."""
        losses = []
        for batch in self.batches:
            self.flat.zero_grads()
            loss = self.task.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            step()
            losses.append(loss.item())
        return losses, self.flat.values.clone()

    def ours(self, name: str) -> tuple[Callable[[], object], Callable[[], list[torch.Tensor]]]:
        optimizer = make_optimizer(name, self.flat, weight_decay=DECAY)
        lr, one, ok = torch.tensor(QUALITY_RATE), torch.tensor(1.0), torch.tensor(True)
        return lambda: optimizer.step(lr, one, ok), lambda: list(optimizer.state().values())

    def peer(
        self, peer: Peer, layout: str, rate: float = QUALITY_RATE
    ) -> tuple[Callable[[], object], Callable[[], list[torch.Tensor]]]:
        tensors = list(self.flat.parameters.values()) if layout == "tensors" else one_tensor(self.flat)
        optimizer = peer.make(tensors, lr=rate)
        return optimizer.step, lambda: peer_state(optimizer)


def quality(steps: int, seed: int) -> None:
    """Print one table: every optimizer on the same batches from the same start."""
    torch.compiler.set_stance("force_eager")  # torchao's arithmetic without minutes of compilation
    plain = Peer(("torch.optim.AdamW",))
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(Path(folder), steps, seed)
        runs: dict[str, Callable[[], Any]] = {
            "torch AdamW, float32": lambda: run.peer(plain, "tensors"),
            "the same, learning rate 1 % higher": lambda: run.peer(plain, "tensors", 1.01 * QUALITY_RATE),
            "inweave adamw8bit": lambda: run.ours("adamw8bit"),
        }
        for name, layout in itertools.product([name for name in PEERS if "8bit" in name], LAYOUTS):
            label = name if layout == "tensors" else f"{name}, one tensor"
            runs[label] = lambda name=name, layout=layout: run.peer(PEERS[name], layout)  # type: ignore[misc]
        print(
            f"torch {torch.__version__}, {run.flat.values.numel():,} parameters, "
            f"{steps} steps at {QUALITY_RATE:g}, seed {seed}"
        )
        print(f"{'':<36}{'final loss':>12}{'off':>12}{'drift':>12}{'state bytes':>14}")
        curve, end = list[float](), run.start
        for label, begin in runs.items():
            run.flat.values.copy_(run.start)
            try:
                step, state = begin()
                losses, values = run.train(step)
            except Exception as error:  # a missing or broken library must not hide the other rows
                print(f"{label:<36}  {reason(error)}")
                continue
            if not curve:
                curve, end = losses, values
            off = statistics.fmean(abs(a - b) / b for a, b in zip(losses, curve, strict=True))
            drift = float((values - end).norm() / (end - run.start).norm())
            final = statistics.fmean(losses[-10:])
            print(f"{label:<36}{final:>12.5f}{off:>12.2e}{drift:>12.3f}{state_bytes(state()):>14,}", flush=True)
    print("final loss: mean of the last ten steps; off and drift: distance from the first row, as above")


def main() -> None:
    if "--quality" in sys.argv:
        quality(STEPS, int(next(iter(sys.argv[2:]), "0")))
        return
    if "--row" in sys.argv:
        name, layout, total = sys.argv[2:]
        print(json.dumps(measure(name, layout, int(total))))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "--tune" in sys.argv:
        tune(SIZES[0])
        return
    for total in SIZES:
        table(total)


if __name__ == "__main__":
    main()
