"""A train job inside the model process: the same run as `inweave train`, its log as events."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import CancelledError
from inweave.serve.contract import Cancelled, Emit, RunnerSettings, RunRequest
from inweave.serve.jobs import Event
from inweave.training.config.schema import TrainConfig
from inweave.training.session import prepare

POLL_SECONDS = 0.2


def run_training(request: RunRequest, emit: Emit, cancelled: Cancelled, settings: RunnerSettings) -> dict[str, Any]:
    """Train and return where the adapter is, below the folder of the job.

    A cancelled run saves its checkpoint first, so that the same job, retried, continues.
    """
    config = TrainConfig(
        **request.config, model=request.model, dataset=request.paths["dataset"], output=request.paths["output"],
        start_from=request.loras.get("start_from"), device=settings.device, resume="auto",
    )  # fmt: skip
    emit(Event("loading", {"model": Path(request.model).name}))

    def progress(activity: str, done: int, total: int) -> None:
        if cancelled():
            raise CancelledError("cancelled while the dataset was prepared")
        emit(Event("preparing", {"activity": activity, "done": done, "total": total}))

    run, sample = prepare(config, on_progress=progress)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            if cancelled():
                run.stop.request()
                return

    def report(record: Mapping[str, Any]) -> None:
        data = {name: value for name, value in record.items() if name not in ("path", "event")}
        kind, path = record.get("event", "progress"), record.get("path")
        if kind == "progress":
            data |= {"total": run.total, "percent": round(100 * record["step"] / run.total, 2)}
        blobs: tuple[bytes, ...] = ()
        if kind == "sample" and isinstance(path, str) and Path(path).is_file():
            blobs = (Path(path).read_bytes(),)
        emit(Event(str(kind), data, blobs))

    threading.Thread(target=watch, name="inweave-cancel", daemon=True).start()
    try:
        result = run.train(sample=sample, on_record=report)
    finally:
        ended.set()
    if cancelled() and result.step < run.total:
        raise CancelledError(f"cancelled after step {result.step}")
    return {
        "adapter": str(result.path), "steps": result.step, "loss": result.losses[-1] if result.losses else None,
        "seconds": round(result.seconds, 2), "reason": result.reason, "skipped_steps": result.skipped_steps,
    }  # fmt: skip
