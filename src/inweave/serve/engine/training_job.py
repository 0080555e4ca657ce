"""A train job inside the model process: the same run as `inweave train`, with its log as events.

history       {records, validations}     the losses of earlier steps of a resumed run, thinned out
validation    {step, validation}   the loss on images that are held out
progress      {step, total, loss, loss_average, lr, eta, ...}
sample        {step, index}        and an image
checkpoint    {step}               the adapter of this step can be used from now on
note, resumed, dataset, memory     {step, text}: other records of the log
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.errors import CancelledError, FormatError
from inweave.files.documents import parse_json
from inweave.files.reading import read_bytes
from inweave.serve.engine.contract import Cancelled, Emit, RunnerSettings, RunRequest
from inweave.serve.jobs.job import Event
from inweave.serve.jobs.private_paths import public
from inweave.serve.jobs.training_runs import checkpoints_in, is_taken
from inweave.training.config.schema import TrainConfig
from inweave.training.session import prepare

log = logging.getLogger("inweave.serve")
POLL_SECONDS = 0.2
#: exit code of a process that was stopped for so long that another one has its job
LOST = 75
#: the most that a killed process loses of a run, regardless of `save_every`
CHECKPOINT_SECONDS = 300.0
MAX_HISTORY = 500  # records of earlier jobs of a run
MAX_SAMPLES = 200
MAX_LOG = 2**28


def run_training(request: RunRequest, emit: Emit, cancelled: Cancelled, settings: RunnerSettings) -> dict[str, Any]:
    """Train an adapter and return a summary of the run.

    A cancelled run saves a checkpoint first; a killed one has a checkpoint that is at most ``CHECKPOINT_SECONDS`` old.
    A run with the same output folder resumes from there, and ends with the bits of a run that was never interrupted.
    """
    config = TrainConfig(
        **request.config, model=request.model, dataset=request.paths["dataset"], output=request.paths["output"],
        start_from=request.loras.get("start_from"), device=settings.device, resume="auto",
    )  # fmt: skip
    emit(Event("loading", {"model": Path(request.model).name}))

    reported_at = 0.0

    def progress(activity: str, done: int, total: int) -> None:
        nonlocal reported_at
        if cancelled():
            raise CancelledError("cancelled while the dataset was prepared")
        if done < total and time.monotonic() - reported_at < POLL_SECONDS:
            return  # a dataset has thousands of images, and every event is stored
        reported_at = time.monotonic()
        emit(Event("preparing", {"activity": activity, "done": done, "total": total}))

    run, sample = prepare(config, on_progress=progress, checkpoint_seconds=CHECKPOINT_SECONDS)
    for event in earlier_events(Path(config.output), config.name, run.number):
        emit(event)
    announced: set[int] = set()

    def announce_checkpoints() -> None:
        for each in checkpoints_in(Path(config.output), config.name):
            if each.step not in announced:
                announced.add(each.step)
                emit(Event("checkpoint", {"step": each.step}))

    ended = threading.Event()

    def watch() -> None:
        stopping = False
        while not ended.wait(POLL_SECONDS):
            if is_taken(Path(config.output), request.lease):
                log.critical("another process continues %s; this one ends without a checkpoint", config.name)
                os._exit(LOST)
            announce_checkpoints()
            if cancelled() and not stopping:
                stopping = True
                run.stop.request()

    def report(record: Mapping[str, Any]) -> None:
        data = {name: value for name, value in record.items() if name not in ("path", "event")}
        if isinstance(text := data.get("text"), str):
            data["text"] = public(text.replace(f"{config.dataset}/", ""))
        kind, path = record.get("event", "progress"), record.get("path")
        if kind == "progress":
            data |= {"total": run.total, "percent": round(100 * record["step"] / run.total, 2)}
        if kind == "sample" and isinstance(path, str) and (event := sample_event(Path(path), data)) is not None:
            emit(event)
        else:  # "started" is an event of the queue
            emit(Event("note" if kind == "started" else str(kind), data))

    watcher = threading.Thread(target=watch, name="inweave-watch", daemon=True)
    watcher.start()
    try:
        result = run.train(sample=sample, on_record=report)
    finally:
        ended.set()
        watcher.join()
        announce_checkpoints()
    if cancelled() and result.step < run.total:
        raise CancelledError(f"cancelled after step {result.step}")
    return {
        "adapter": str(result.path), "steps": result.step, "loss": result.losses[-1] if result.losses else None,
        "seconds": round(result.seconds, 2), "reason": result.reason, "skipped_steps": result.skipped_steps,
    }  # fmt: skip


def sample_event(path: Path, data: Mapping[str, Any]) -> Event | None:
    """Return a sample as an event; None if its file is gone."""
    match = re.search(r"-(\d+)-(\d+)$", path.stem)
    if match is None or not path.is_file():
        return None
    return Event("sample", {**data, "step": int(match[1]), "index": int(match[2])}, path.read_bytes())


def earlier_events(output: Path, name: str, step: int) -> list[Event]:
    """Return the events of a run up to the step it resumes from, so that readers of this job see the whole run."""
    if step == 0:
        return []
    logged = _records(output / f"{name}.jsonl")
    records = [
        {field: record.get(field) for field in ("step", "loss", "loss_average")}
        for record in logged
        if "loss" in record and record["step"] <= step
    ]
    validations = [
        {"step": record["step"], "validation": record["validation"]}
        for record in logged
        if "validation" in record and record["step"] <= step
    ]
    every = -(-len(records) // MAX_HISTORY) or 1
    thinned = [*records[:-1:every], *records[-1:]]
    samples = [
        event
        for path in sorted((output / "samples").glob("*.png"))
        if (event := sample_event(path, {})) is not None and event.data["step"] <= step
    ]
    history = {"records": thinned, "validations": validations[-MAX_HISTORY:], "resumed_from": step}
    return [Event("history", history), *samples[-MAX_SAMPLES:]]


def _records(log: Path) -> list[dict[str, Any]]:
    records = []
    for line in read_bytes(log, MAX_LOG).splitlines() if log.is_file() else ():
        try:
            record = parse_json(line, "")
        except FormatError:
            continue  # a line that a crash cut short
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
