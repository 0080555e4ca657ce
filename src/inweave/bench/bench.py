"""A benchmark that runs: on which device, how fast that device is, what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inweave.bench.models import published_blueprint
from inweave.bench.report import Report, Row, make_report
from inweave.bench.timing import measure_rates
from inweave.models import embedded
from inweave.ops.device import choose_device, choose_dtype


class Bench:
    """``progress`` is called with what is being measured; `rows` and `notes` are the result."""

    def __init__(self, device: str | None, progress: Callable[[str], None]) -> None:
        self.device, self.progress = choose_device(device), progress
        self.dtype = choose_dtype(None, self.device)
        progress(f"the rates of {self.device}")
        self.rates = measure_rates(self.device, self.dtype)
        self.rows: Sequence[Row] = ()
        self.notes: Sequence[str] = ()

    def model(self, name: str | None, size: int | None) -> tuple[str, int]:
        """The model that was chosen, or the default of this device, and the size of its images."""
        blueprint = published_blueprint(name or ("sdxl" if self.device.type == "cuda" else embedded.NAME))
        return blueprint.name, size or (blueprint.variant.size if blueprint.variant is not None else 1024)

    def report(self, bench: str, command: str) -> Report:
        """All of it, with the rates behind the limits."""
        rates = f"{self.rates.operations / 1e12:.3g} TFLOP/s in a product, {self.rates.bytes / 1e9:,.0f} GB/s in a copy"
        return make_report(bench, command, self.device, self.rows, [f"limits: {rates}", *self.notes])
