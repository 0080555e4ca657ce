"""Estimates of how long a device needs to start a job, and to run it, from measurements of earlier jobs.

    start(job, device) = load(model)       if the model is not in the device's memory
                       + read(adapter)     for each adapter that is not

Load times are averaged per model, read times over all adapters, run times per model and kind of job. Each average is
exponential, with weight ``SHARE`` for the newest measurement; before the first one, a default is used.
"""

from __future__ import annotations

from collections.abc import Callable

from inweave.serve.jobs.candidate import Candidate
from inweave.serve.scheduler.device import DeviceView

SHARE = 0.3
LOAD_SECONDS = 10.0
READ_SECONDS = 0.1
RUN_SECONDS = 5.0


class Costs:
    """Measured times of loading, reading and running."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, ...], float] = {}

    def observe_load(self, model: str, seconds: float) -> None:
        """Record how long a model took to load."""
        self._observe(("load", model), seconds)

    def observe_read(self, seconds: float) -> None:
        """Record how long one adapter took until it could be merged."""
        self._observe(("read",), seconds)

    def observe_run(self, job: Candidate, seconds: float) -> None:
        """Record how long a job ran."""
        self._observe(("run", job.kind, job.model), seconds)

    def run_seconds(self, job: Candidate) -> float:
        """Return how long a job will run."""
        return self._means.get(("run", job.kind, job.model), RUN_SECONDS)

    def start_seconds(self, job: Candidate, device: DeviceView) -> float:
        """Return how long a device needs before it can work on a job."""
        return self.start_of(job)(device)

    def start_of(self, job: Candidate) -> Callable[[DeviceView], float]:
        """Return the function of a device that says how long it needs before it can work on a job."""
        model, adapters = job.model, frozenset(job.adapters)
        load = self._means.get(("load", model), LOAD_SECONDS)
        read = self._means.get(("read",), READ_SECONDS)

        def start(device: DeviceView) -> float:
            missing = 0 if adapters <= device.adapters else len(adapters - device.adapters)
            return (0.0 if model in device.models else load) + missing * read

        return start

    def _observe(self, key: tuple[str, ...], seconds: float) -> None:
        mean = self._means.get(key, seconds)
        self._means[key] = mean + SHARE * (seconds - mean)
