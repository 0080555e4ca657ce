"""What a worker counts since it started: waiting and run times of jobs, and HTTP requests.

    inweave_job_wait_seconds{operation}            from submission to the first start
    inweave_job_run_seconds{operation,state}       from the last start to the end
    inweave_job_loras_total{found}                 jobs with LoRAs that start; found: in the "memory" of their device,
                                                   or on "disk"
    inweave_http_requests_total{method,route,status}, inweave_http_request_seconds{route}
    inweave_quota_refusals_total{account,quota}

Routes are those of the application, never paths: a client cannot make up new series.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from inweave.serve.jobs.job import Job

_JOB_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 6 * 3600, 24 * 3600)
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Figures:
    """Counters and histograms of one worker. Safe for threads."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self._wait = Histogram(
            "inweave_job_wait_seconds", "From the submission of a job to its first start", ["operation"],
            buckets=_JOB_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._run = Histogram(
            "inweave_job_run_seconds", "From the last start of a job to its end", ["operation", "state"],
            buckets=_JOB_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._loras = Counter(
            "inweave_job_loras", "Jobs with LoRAs, by where their device finds them", ["found"], registry=self.registry
        )
        self._requests = Counter(
            "inweave_http_requests", "HTTP requests that were answered", ["method", "route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._latency = Histogram(
            "inweave_http_request_seconds", "From the head of a request to the end of its answer", ["route"],
            buckets=_HTTP_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._refusals = Counter(
            "inweave_quota_refusals", "Requests that were beyond a quota of their account", ["account", "quota"],
            registry=self.registry,
        )  # fmt: skip

    def refused(self, account: str, quota: str) -> None:
        """Count a request that was beyond a quota."""
        self._refusals.labels(account, quota).inc()

    def started(self, job: Job) -> None:
        """Count a job that begins to run."""
        if job.attempts == 1 and job.started is not None:
            self._wait.labels(job.kind).observe(max(0.0, job.started - job.created))

    def placed(self, in_memory: bool) -> None:
        """Count a job with LoRAs that begins to run on a device that has them in memory, or has not."""
        self._loras.labels("memory" if in_memory else "disk").inc()

    def ended(self, job: Job) -> None:
        """Count a job that ended on a device."""
        if job.final and job.started is not None:
            self._run.labels(job.kind, job.state).observe(max(0.0, (job.finished or time.time()) - job.started))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; ``status`` 0: the connection ended without an answer."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._latency.labels(route).observe(seconds)
