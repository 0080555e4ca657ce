"""Metrics for Prometheus: the state of the worker, read on request, and its `figures`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inweave.serve.jobs.job import FINAL
from inweave.serve.service import DeviceState, Service

_PROCESSES = {
    "inweave.serve.engine.model_process": "model", "inweave.serve.sandbox.process": "sandbox",
    "inweave.serve.planner.process": "planner", "inweave.serve.cluster.bridge": "cluster",
}  # fmt: skip


class ServiceCollector(Collector):
    """Reads the state of a worker; keeps nothing itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        jobs = GaugeMetricFamily(
            "inweave_jobs", "Jobs that wait, run, or ended and are kept, by state", labels=["state"]
        )
        for state in ("queued", "running", *FINAL):
            jobs.add_metric([state], service.jobs.count_now(state))
        yield jobs
        yield GaugeMetricFamily("inweave_ready", "Whether a job would run now", value=float(service.readiness[0]))
        yield GaugeMetricFamily("inweave_loras", "LoRA files in the library", value=service.loras.count_now())
        yield GaugeMetricFamily(
            "inweave_uptime_seconds", "Since the worker started", value=time.monotonic() - service.started_at
        )
        finished = CounterMetricFamily("inweave_jobs_finished", "Jobs that ended on a device", labels=["device"])
        restarts = CounterMetricFamily("inweave_process_restarts", "Model processes that died", labels=["device"])
        busy = CounterMetricFamily("inweave_busy_seconds", "Time spent on jobs", labels=["device"])
        for number, device in enumerate(service.devices):
            finished.add_metric([str(number)], device.finished_jobs)
            restarts.add_metric([str(number)], device.restarts)
            busy.add_metric([str(number)], device.busy_seconds)
        yield from (finished, restarts, busy)
        yield from device_memory(service.devices)
        memory = GaugeMetricFamily(
            "inweave_process_memory_bytes", "Resident memory of the worker's processes", labels=["process"]
        )
        for process, size in memory_by_process().items():
            memory.add_metric([process], size)
        yield memory


def device_memory(devices: Sequence[DeviceState]) -> Iterable[Metric]:
    """Yield the memory of the devices that have some of their own, as their model processes reported it last."""
    for name, text in (
        ("allocated", "Memory of tensors on a device"), ("reserved", "Memory that the model process holds on a device"),
        ("total", "All memory of a device"),
    ):  # fmt: skip
        family = GaugeMetricFamily(f"inweave_device_memory_{name}_bytes", text, labels=["device"])
        for number, device in enumerate(devices):
            if device.memory is not None:
                family.add_metric([str(number)], getattr(device.memory, name))
        if family.samples:
            yield family


def memory_by_process() -> dict[str, int]:
    """Return the resident bytes of this process (web) and, added up by their module, of those it started."""
    sizes = {"web": _resident(Path("/proc/self"))}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                module = words[words.index(b"-m") + 1].decode()
                name = _PROCESSES.get(module, "library")
                sizes[name] = sizes.get(name, 0) + _resident(folder)
    return sizes


def _resident(process: Path) -> int:
    try:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def metrics_text(service: Service) -> bytes:
    """Return the answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service))
    return generate_latest(registry) + generate_latest(service.figures.registry)
