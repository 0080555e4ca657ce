"""One run of a benchmark: its device, the rates of that device, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from inweave.bench.models import published_blueprint
from inweave.bench.report import BenchReport, BenchRow, make_report
from inweave.bench.step import PEER, missing_peer
from inweave.bench.timing import Rates, measure_rates
from inweave.errors import MemoryBudgetError
from inweave.models import embedded
from inweave.models.model import on_meta
from inweave.ops.tensors.device import choose_device, choose_dtype, device_memory

_GIB = 1 << 30


class Bench:
    """A benchmark on a device; ``progress`` is called with the current case; `rows` and `notes` are the result."""

    def __init__(self, device: str | None, progress: Callable[[str], None]) -> None:
        self.device, self.progress = choose_device(device), progress
        self.dtype = choose_dtype(None, self.device)
        self.rows: Sequence[BenchRow] = ()
        self.notes: Sequence[str] = ()
        self._remarks: list[str] = []

    @cached_property
    def rates(self) -> Rates:
        """The device's measured rates, on first use."""
        self.progress(f"measuring the hardware limits of {self.device}")
        return measure_rates(self.device, self.dtype)

    def model(self, name: str | None, size: int | None) -> tuple[str, int]:
        """Return the chosen model, or the default of this device, and the size of its images."""
        blueprint = published_blueprint(name or ("sdxl" if self.device.type == "cuda" else embedded.NAME))
        weights = sum(weight.numel() for weight in on_meta(blueprint.denoiser).parameters()) * self.dtype.itemsize
        room = device_memory(self.device)["total_bytes"]
        if weights > room:
            dtype = str(self.dtype).removeprefix("torch.")
            raise MemoryBudgetError(
                f"{blueprint.name}: its weights alone take {weights / _GIB:.1f} GiB in {dtype}, and {self.device} has "
                f"{room / _GIB:.1f} GiB of memory; choose a smaller --model"
            )
        return blueprint.name, size or (blueprint.variant.size if blueprint.variant is not None else 1024)

    def with_peers(self, preferred: bool) -> bool:
        """Return whether to measure the peer too; a note explains why not if it was ``preferred``."""
        missing = missing_peer()
        if preferred and missing:
            self._remarks.append(f"{PEER}: not measured, since {missing} is not installed")
        return preferred and not missing

    def report(self, bench: str, command: str) -> BenchReport:
        """Return the report, with the rates behind the limits."""
        notes = [*self._remarks, *self.notes]
        if any(row.limit is not None for row in self.rows):
            rates = self.rates
            speeds = f"{rates.operations / 1e12:.3g} TFLOP/s in a product, {rates.bytes / 1e9:,.0f} GB/s in a copy"
            notes.insert(0, f"limits: {speeds}")
        return make_report(bench, command, self.device, self.rows, notes)
