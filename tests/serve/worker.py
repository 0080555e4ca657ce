"""A real worker in a separate process, and a client for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

READY_SECONDS = 300
#: a job that takes almost no time
SMALL: dict[str, Any] = {"steps": 1, "width": 64, "height": 64}


class Worker:
    """`inweave serve` on a free port."""

    def __init__(
        self, data: Path, *options: str, token: str | None = None, log: Path | None = None, under: tuple[str, ...] = ()
    ) -> None:
        """``under``: a command that runs it, such as a tracer."""
        self.data, self._options, self.token, self._under = data, options, token, under
        self._log = log or data.parent / f"{data.name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.http = httpx.Client()
        self.first_answers: dict[str, httpx.Response] = {}

    def start(self, *, wait: bool = True) -> Worker:
        """Start the worker, or restart it on the same data."""
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        if self.token:
            environment["INWEAVE_TOKEN"] = self.token
        log = self._log.open("a")
        command = [
            *self._under,
            sys.executable,
            "-m",
            "inweave",
            "serve",
            "--port",
            "0",
            "--data",
            str(self.data),
            *self._options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        log.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on" in line, self.log()
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.http.close()
        self.http = httpx.Client(base_url=line.split()[-1], timeout=120, headers=headers)
        # at once: a client that has read the line can connect
        requests = [("GET", "/health"), ("GET", "/ready"), ("HEAD", "/health"), ("HEAD", "/ready"), ("GET", "/metrics")]
        self.first_answers = {f"{method} {path}": self.http.request(method, path) for method, path in requests}
        if wait:
            self.wait_ready()
        return self

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {READY_SECONDS} s: {self.log()}")

    def model_pids(self) -> list[int]:
        """Return the ids of the model processes."""
        return self.child_pids("inweave.serve.engine.model_process")

    def child_pids(self, module: str) -> list[int]:
        """Return the ids of this worker's processes that run a module."""
        assert self.process is not None
        pids = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
                parent = int(entry.with_name("stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and module.encode() in words:
                pids.append(int(entry.parent.name))
        return pids

    def kill(self) -> None:
        """Kill the web process with SIGKILL; its children must notice by themselves."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.http.close()
        return code

    def submit(self, **fields: Any) -> str:
        answer = self.http.post(
            "/v1/jobs", json={"operation": "image_generation", "prompt": "a red apple", "steps": 2} | fields
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/jobs/{job}")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def queued(self) -> int:
        """Return the number of waiting jobs."""
        return len(self.http.get("/v1/jobs", params={"state": "queued", "limit": 200}).json()["jobs"])

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait until a condition is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def running(self, job: str, attempt: int = 1) -> None:
        """Wait until a job runs, for the first or a later time."""

        def started() -> bool:
            document = self.job(job)
            assert document["state"] in ("queued", "running"), document
            return document["state"] == "running" and document["attempts"] >= attempt

        self.until(started)

    def ended(self, job: str, seconds: float = 300) -> dict[str, Any]:
        """Wait for the end of a job and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            document = self.job(job)
            if document["state"] in ("done", "failed", "cancelled"):
                return document
            time.sleep(0.05)
        raise AssertionError(f"{job} has not ended: {document}\n{self.log()}")

    def events(self, job: str, last: int | None = None, path: str = "events") -> Iterator[dict[str, Any]]:
        """Yield the events of a job as they come."""
        for _, event in self.numbered_events(job, last, path):
            yield event

    def numbered_events(
        self, job: str, last: int | None = None, path: str = "events"
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the events of a job with their numbers, as `Last-Event-ID` takes them."""
        headers = {} if last is None else {"Last-Event-ID": str(last)}
        with self.http.stream("GET", f"/v1/jobs/{job}/{path}", headers=headers) as stream:
            assert stream.status_code == 200, stream.read()
            number = 0
            for line in stream.iter_lines():
                if line.startswith("id:"):
                    number = int(line.removeprefix("id:"))
                if line.startswith("data:"):
                    yield number, json.loads(line.removeprefix("data:"))
