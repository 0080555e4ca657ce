"""Clock and power of a GPU during a measurement, sampled with nvidia-smi five times per second.

A GPU at its power limit lowers its clock, so the same work gets slower after a few seconds: figures are comparable only
with the clock they were measured at.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from types import TracebackType
from typing import Self

import torch

_FIELDS = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
_INTERVAL = 200  # milliseconds
_BUSY = 0.5  # samples below this fraction of the highest power are from before or after the work


class ClockLog:
    """Samples while the block runs; `note` is None if nvidia-smi is missing or reports nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self.note: str | None = None

    def __enter__(self) -> Self:
        command = shutil.which("nvidia-smi") if self._device.type == "cuda" else None
        if command is not None:
            gpu = f"--id=GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            query = [f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop-ms={_INTERVAL}"]
            self._process = subprocess.Popen(
                [command, gpu, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self.note = clock_note(self._process.communicate()[0])


def clock_note(text: str) -> str | None:
    """Summarize the output of nvidia-smi, one sample per line; lines without numbers are skipped."""
    samples = []
    for line in text.splitlines():
        clock, _, rest = line.partition(",")
        power, _, limit = rest.partition(",")
        try:
            samples.append((float(clock), float(power), limit.strip() == "Active"))
        except ValueError:  # [N/A], or a line that was cut off
            continue
    highest = max((power for _, power, _ in samples), default=0.0)
    busy = [sample for sample in samples if sample[1] >= _BUSY * highest]
    if not busy:
        return None
    clocks = [clock for clock, _, _ in busy]
    at_limit = sum(limited for *_, limited in busy) / len(busy)
    return (
        f"clock {statistics.median(clocks):,.0f} MHz ({min(clocks):,.0f} to {max(clocks):,.0f}), "
        f"at most {highest:.0f} W, at the power limit in {at_limit:.0%} of {len(busy)} samples"
    )
