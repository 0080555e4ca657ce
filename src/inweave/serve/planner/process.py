"""The process that plans training runs, with the trainer's own code, without weights, and within ``MEMORY`` bytes.

crops {dataset, model, settings}                        -> {buckets, crop, resolution, ...}
check {dataset, model, settings, output, start_from}    -> {ok, estimate, dataset, problems, ...}
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError, MemoryBudgetError, RequestError, TargetError
from inweave.serve.engine.rpc_loop import Data, answer_calls, collect_less
from inweave.serve.jobs.private_paths import PATHS, public

#: bytes of private memory; torch and the libraries take 0.6 GB of it, the factors of the adapter most of the rest
MEMORY = 4 * 1024**3
WATCH_SECONDS = 0.05


def plan_crops(data: Data) -> Data:
    """Return how every image of a dataset is scaled and cropped into its bucket."""
    from inweave.training.config.schema import TrainConfig
    from inweave.training.tasks.diffusion_setup import crop_plan

    config = TrainConfig(**data["settings"], dataset=data["dataset"], model=data["model"])
    complete, rows = crop_plan(config)
    images, buckets = [], dict[str, int]()
    for example, place in rows:
        row: dict[str, Any] = {"name": example.path.name, "width": example.size[0], "height": example.size[1]}
        if place is None:
            images.append({**row, "bucket": None})
            continue
        bucket = str(place.bucket)
        buckets[bucket] = buckets.get(bucket, 0) + 1
        images.append({
            **row, "bucket": bucket, "resized": list(place.resized), "crop": list(place.crop),
            "scale": round(place.scale, 6), "cropped": round(place.cropped_fraction, 6), "own_bucket": place.own_bucket,
        })  # fmt: skip
    return {"pictures": images, "buckets": dict(sorted(buckets.items())), "crop": complete.crop,
            "resolution": complete.side}  # fmt: skip


def plan_run(data: Data) -> Data:
    """Return the report of `inweave train --check`; errors in the dataset are part of it, not errors of the call."""
    from inweave.ops.tensors.device import choose_device, device_memory
    from inweave.training.config.schema import TrainConfig
    from inweave.training.session import check

    config = TrainConfig(
        **data["settings"], dataset=data["dataset"], model=data["model"], output=data["output"],
        start_from=data.get("start_from"), device=data.get("device"),
    )  # fmt: skip
    device = device_memory(choose_device(config.device))
    try:
        complete, report, estimate = check(config)
    except ConfigError as error:
        return {"ok": False, "problems": [*map(str, error.problems)], "device": device}
    except (FormatError, TargetError, MemoryBudgetError) as error:
        return {"ok": False, "problems": [str(error)], "device": device}
    problems = estimate.pop("problems")
    facts = report.as_dict()
    warnings: list[str] = getattr(report, "warnings", list)()  # a report on texts has none
    return {
        "ok": not problems, "problems": problems, "warnings": warnings, "dataset": facts, "estimate": estimate,
        "settings": complete.model_dump(mode="json"), "device": device,
    }  # fmt: skip


def without_folders(value: Any, folder: str) -> Any:
    """Return an answer without paths of this machine: images by their file names."""
    if isinstance(value, str):
        return public(value.replace(f"{folder}/", "").replace(folder, "the dataset"))
    if isinstance(value, dict):
        return {without_folders(name, folder): without_folders(each, folder) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each, folder) for each in value]
    return value


class MemoryGuard:
    """Ends calls that take more private memory than ``limit``; mapped files and what drivers reserve do not count."""

    def __init__(self, limit: int = MEMORY) -> None:
        self._limit, self._active = limit, False

    def start(self) -> None:
        """Watch this process from a thread."""
        if private_bytes() is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            size = private_bytes() or 0
            if size > self._limit and self._active:
                self._active = False
                _thread.interrupt_main()
            elif size > 2 * self._limit:
                os._exit(1)  # the call goes on all the same

    def guarded(self, plan: Callable[[Data], Data]) -> Callable[[Data], Data]:
        """Return a call that refuses a run whose plan takes too much."""

        def call(data: Data) -> Data:
            self._active = True
            try:
                return plan(data)
            except (KeyboardInterrupt, MemoryError):
                raise RequestError(
                    f"such a run cannot be planned here: the plan takes more than {self._limit / 2**30:.3g} GB; choose "
                    "a smaller rank, batch or resolution"
                ) from None
            finally:
                self._active = False

        return call


def private_bytes() -> int | None:
    """Return the private memory of this process; None where the system does not say."""
    try:
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("RssAnon:") + 1]) * 1024
    except (OSError, ValueError):
        return None


GUARD = MemoryGuard()
CALLS: dict[str, Callable[[Data], Data]] = {"crops": GUARD.guarded(plan_crops), "check": GUARD.guarded(plan_run)}


def main() -> None:
    GUARD.start()
    collect_less()
    answer_calls(
        CALLS, begin=lambda settings: PATHS.add(settings["private"]),
        redact=lambda call, answer: without_folders(answer, call["dataset"]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
