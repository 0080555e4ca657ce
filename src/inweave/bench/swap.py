"""Swapping LoRAs in a full-size model: in memory, from files, and while the model itself is loaded.

    swap       from one LoRA to another that was used before      peer: unfuse_lora, fuse_lora
    strength   the same LoRA at another strength                  peer: the same two
    restore    back to the base, bit for bit                      peer: unfuse_lora
    stack      five LoRAs at once, from the base                  peer: fuse_lora of five
    file       an unused LoRA from a file in the page cache       peer: load_lora_adapter, fuse_lora
    build      the denoiser from a file, without and with         peer: from_pretrained, load_lora_adapter, fuse_lora
               three LoRAs merged on the way

The limit of a swap is its traffic: originals are read once, weights written once. `plain` is the same work without
anything that makes it safe: the merge kernel or the copies alone, and one safetensors file loaded to the device; `times
plain` says on any machine whether the host has become slower. For both, the weights that differ from the base
afterwards are counted.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from inweave.bench.models import published_blueprint, random_model, write_lora
from inweave.bench.report import BenchRow
from inweave.bench.step import PEER, fresh_memory
from inweave.bench.timing import Rates, Work, wall_seconds
from inweave.models.model import Model, on_meta
from inweave.ops.merge import Product, WeightUpdate, merge_products, prepare_merge
from inweave.training.adapters.targets import select_modules
from inweave.training.config.schema import TrainConfig
from inweave.weights.build import build
from inweave.weights.gc_pause import collector_waits
from inweave.weights.merged import MergedSource
from inweave.weights.source import FileSource
from inweave.weights.weaver import Weaver

STACK = 5
#: times the plain work on a GPU, by row: beyond it the host has become slower
LARGEST = {
    "swap to another LoRA": 1.9, "the same LoRA at another strength": 1.9, "restore the base": 1.8,
    "stack of 5 LoRAs": 1.8, "build from a file": 0.6, "build from a file with 3 LoRAs merged": 0.8,
}  # fmt: skip


class SwapBench:
    """A random model, LoRA files for its attention, and the measured rows."""

    def __init__(self, name: str, rank: int, device: torch.device, dtype: torch.dtype, folder: Path, runs: int) -> None:
        self.device, self.dtype, self.rank, self.folder, self.runs = device, dtype, rank, folder, runs
        self.model: Model = random_model(name, device, dtype)
        self.part = published_blueprint(name).denoiser
        self.network: Any = self.model.denoiser
        config = TrainConfig.of(dataset="-", targets="attention")
        self.modules = select_modules("unet", self.network, config)
        self.files = [self._lora(f"used{number}", number) for number in range(STACK)]
        self.new_files = [self._lora(f"new{number}", 100 + number) for number in range(runs + 1)]
        self.rows: list[BenchRow] = []
        self.notes: list[str] = []

    def _lora(self, name: str, seed: int) -> Path:
        return write_lora(self.folder / f"{name}.safetensors", self.model, self.rank, seed)

    def milliseconds(
        self, work: Work, *, before: Work | None = None, runs: int | None = None, warmup: int = 1
    ) -> float:
        samples = wall_seconds(work, self.device, runs=runs or self.runs, warmup=warmup, before=before)
        return statistics.median(samples) * 1e3

    def ours(self) -> dict[str, float]:
        """Measure this package by row; afterwards the model has its base weights."""
        weaver = Weaver({"unet": self.network}, keep="device" if self.device.type == "cuda" else "auto")
        for file in (*self.files[:2], None):
            weaver.apply([] if file is None else [(file, 1.0)])
        turns, strengths, files = itertools.cycle(self.files[:2]), itertools.count(1), iter(self.new_files)
        stack = [(file, 0.1 * (number + 1)) for number, file in enumerate(self.files)]
        weaver.apply(stack)
        restore = lambda: weaver.apply([])  # noqa: E731
        figures = {
            "swap": self.milliseconds(lambda: weaver.apply([(next(turns), 0.8)])),
            "strength": self.milliseconds(lambda: weaver.apply([(self.files[0], 0.01 * next(strengths))])),
            "restore": self.milliseconds(restore, before=lambda: weaver.apply([(self.files[0], 1.0)])),
            "stack": self.milliseconds(lambda: weaver.apply(stack), before=restore),
            "file": self.milliseconds(lambda: weaver.apply([(next(files), 0.8)]), before=restore),
        }
        weaver.apply([])
        return figures

    def plain(self) -> dict[str, float]:
        """Measure the least work of some rows: nothing is looked up, checked, remembered or written to the model."""
        weights = [self.network.get_submodule(module).weight.detach() for module in self.modules]
        results = [torch.empty_like(weight) for weight in weights]
        factors = [load_file(file, device=str(self.device)) for file in self.files]

        def merge(count: int) -> Callable[[], object]:
            keys = [f"{self.part.folder}.{module}.lora_" for module in self.modules]
            updates = [
                WeightUpdate(
                    weight, out, tuple(Product(f[f"{key}B.weight"], f[f"{key}A.weight"], 0.8) for f in factors[:count])
                )
                for weight, out, key in zip(weights, results, keys, strict=True)
            ]
            return prepare_merge(updates).run if self.device.type == "cuda" else lambda: merge_products(updates)

        one = self.milliseconds(merge(1))
        copies = self.milliseconds(lambda: torch._foreach_copy_(results, weights))
        return {"swap": one, "strength": one, "restore": copies, "stack": self.milliseconds(merge(STACK))}

    def peers(self) -> dict[str, float]:
        """Measure the peer by row; the model keeps the weights that result."""
        network, prefix = self.network, self.part.folder
        names = [f"used{number}" for number in range(STACK)]

        def load(file: Path) -> None:
            network.load_lora_adapter(load_file(file), adapter_name=file.stem, prefix=prefix)

        def fuse(*adapters: str) -> Callable[[], None]:
            def work() -> None:
                network.set_adapters(list(adapters), [0.8] * len(adapters))
                network.fuse_lora(adapter_names=list(adapters))

            return work

        loading = self.milliseconds(lambda: load(self.files[0]), runs=1, warmup=0)
        for file in self.files[1:]:
            load(file)
        once: dict[str, Any] = {"runs": 2, "warmup": 0}
        fusing = self.milliseconds(fuse(names[0]), before=network.unfuse_lora, **once)
        stacking = self.milliseconds(fuse(*names), before=network.unfuse_lora, **once)
        network.unfuse_lora()
        undoing = self.milliseconds(network.unfuse_lora, before=fuse(names[0]), **once)
        network.unload_lora()
        swapping = undoing + fusing
        return {
            "swap": swapping, "strength": swapping, "restore": undoing, "stack": stacking, "file": loading + fusing,
        }  # fmt: skip

    def builds(self, *, peers: bool) -> Iterator[BenchRow]:
        """Yield rows of building the denoiser from a file."""
        target = self.folder / self.part.folder
        self.network.save_pretrained(target, max_shard_size="1000GB")
        (checkpoint,) = target.glob("*.safetensors")
        kind = type(self.network)

        def ours(loras: Sequence[Path]) -> object:
            with collector_waits():
                source: Any = FileSource(checkpoint)
                if loras:
                    source = MergedSource(source, [(file, 0.7) for file in loras], component="unet")
                return build(on_meta(self.part), source, device=self.device, dtype=self.dtype)

        def theirs(loras: Sequence[Path]) -> object:
            network = kind.from_pretrained(target, torch_dtype=self.dtype).to(self.device)
            for file in loras:
                network.load_lora_adapter(load_file(file), adapter_name=file.stem, prefix=self.part.folder)
            if loras:
                network.set_adapters([file.stem for file in loras], [0.7] * len(loras))
                network.fuse_lora()
            return network

        plain = self.milliseconds(lambda: load_file(checkpoint, device=str(self.device)))
        for count, name in ((0, "build from a file"), (3, "build from a file with 3 LoRAs merged")):
            loras = self.files[:count]
            figures = {PEER: self.milliseconds(lambda loras=loras: theirs(loras), runs=2)} if peers else {}  # type: ignore[misc]
            duration = self.milliseconds(lambda loras=loras: ours(loras))  # type: ignore[misc]
            yield BenchRow(name, "ms", duration, figures, None, _times(duration, plain))


def measure_swap(
    name: str,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    rates: Rates,
    *,
    runs: int = 7,
    peers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return rows in milliseconds, and notes."""
    report = progress or (lambda text: None)
    with tempfile.TemporaryDirectory(prefix="inweave-bench-") as temporary, fresh_memory(device):
        report(f"{name}: a model and {STACK + runs + 1} LoRAs of rank {rank}")
        bench = SwapBench(name, rank, device, dtype, Path(temporary), runs)
        original = {key: value.clone() for key, value in bench.network.state_dict().items()}
        report(f"{name}: swaps")
        plain, ours = bench.plain(), bench.ours()
        drift = {"inweave": _changed(bench.network, original)}
        report(f"{name}: loading")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an existing adapter of the peer
            builds = list(bench.builds(peers=peers))
        theirs: dict[str, float] = {}
        if peers:
            report(f"{name}: {PEER}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about nothing being fused before the first round
                theirs = bench.peers()
            drift[PEER] = _changed(bench.network, original)
        weights = [bench.network.get_submodule(module).weight for module in bench.modules]
        size = sum(weight.numel() for weight in weights)
        factors = sum(rank * sum(weight.shape) for weight in weights)
        limit = rates.seconds(0, (2 * size + factors) * weights[0].element_size()) * 1e3
        titles = {
            "swap": "swap to another LoRA", "strength": "the same LoRA at another strength",
            "restore": "restore the base", "stack": f"stack of {STACK} LoRAs", "file": "a LoRA from a file",
        }  # fmt: skip
        rows = [
            BenchRow(
                title,
                "ms",
                ours[key],
                {PEER: theirs[key]} if key in theirs else {},
                limit,
                _times(ours[key], plain.get(key)),
            )
            for key, title in titles.items()
        ]
    total = sum(value.numel() for value in original.values())
    notes = [
        f"{name}: rank {rank} on {len(weights)} weights, {size / 1e6:.4g} M numbers, {dtype}".replace("torch.", "")
    ]
    notes += [
        f"weights that differ from the base afterwards, {who}: {count:,} of {total:,}" for who, count in drift.items()
    ]
    if device.type == "cuda":
        notes += slower([*rows, *builds])
    return [*rows, *builds], notes


def slower(rows: Iterable[BenchRow]) -> list[str]:
    """Return a line for every row that takes more times the plain work than it did."""
    ratios = {row.name: row.details.get("times plain") for row in rows}
    return [
        f"{name}: {ratio:.2f} times the plain work, at most {LARGEST[name]:g} are expected"
        for name, ratio in ratios.items()
        if isinstance(ratio, float) and ratio > LARGEST.get(name, ratio)
    ]


def _times(duration: float, plain: float | None) -> dict[str, float | str | None]:
    return {"plain": plain, "times plain": None if plain is None else duration / plain}


def _changed(network: torch.nn.Module, original: dict[str, torch.Tensor]) -> int:
    state = network.state_dict()
    return sum(int((state[name] != value).sum()) for name, value in original.items())
