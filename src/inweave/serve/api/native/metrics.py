"""Metrics for Prometheus, computed on request."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inweave.serve.jobs.job import FINAL
from inweave.serve.service import Service


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
        yield GaugeMetricFamily("inweave_loras", "LoRA files in the library", value=service.loras.count())
        yield GaugeMetricFamily(
            "inweave_uptime_seconds", "Since the worker started", value=time.time() - service.started
        )
        finished = CounterMetricFamily("inweave_jobs_finished", "Jobs that ended on a device", labels=["device"])
        restarts = CounterMetricFamily("inweave_process_restarts", "Model processes that died", labels=["device"])
        busy = CounterMetricFamily("inweave_busy_seconds", "Time spent on jobs", labels=["device"])
        for number, device in enumerate(service.devices):
            finished.add_metric([str(number)], device.finished_jobs)
            restarts.add_metric([str(number)], device.restarts)
            busy.add_metric([str(number)], device.busy_seconds)
        yield from (finished, restarts, busy)


def metrics_text(service: Service) -> bytes:
    """Return the answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service))
    return generate_latest(registry)
