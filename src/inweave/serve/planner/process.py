"""The process that plans training runs, with the trainer's own code and without weights.

    -> call {name: crops, dataset, model, settings}                <- answer {pictures, buckets, ...} | error
    -> call {name: check, dataset, model, settings, start_from}    <- answer {ok, estimate, dataset, problems, ...} | error

It ends when its standard input ends.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from inweave.errors import ConfigError, FormatError, InweaveError, MemoryBudgetError, TargetError
from inweave.serve.engine.rpc_loop import answer_calls, collect_less
from inweave.serve.engine.wire import Message
from inweave.serve.jobs.failures import failure_of, public


def plan_crops(data: dict[str, Any]) -> dict[str, Any]:
    """How every picture of a dataset is scaled and cropped into its bucket."""
    from inweave.training.config.schema import TrainConfig
    from inweave.training.tasks.diffusion_setup import crop_plan

    config = TrainConfig(**data["settings"], dataset=data["dataset"], model=data["model"])
    complete, rows = crop_plan(config)
    pictures, buckets = [], dict[str, int]()
    for example, place in rows:
        row: dict[str, Any] = {"name": example.path.name, "width": example.size[0], "height": example.size[1]}
        if place is None:
            pictures.append({**row, "bucket": None})
            continue
        bucket = str(place.bucket)
        buckets[bucket] = buckets.get(bucket, 0) + 1
        pictures.append({
            **row, "bucket": bucket, "resized": list(place.resized), "crop": list(place.crop), "scale": round(place.scale, 6),
            "cropped": round(place.cropped_fraction, 6), "own_bucket": place.own_bucket,
        })  # fmt: skip
    return {"pictures": pictures, "buckets": dict(sorted(buckets.items())), "crop": complete.crop,
            "resolution": complete.resolution}  # fmt: skip


def plan_run(data: dict[str, Any]) -> dict[str, Any]:
    """What `inweave train --check` says of a run; what the dataset lacks is a problem of the run, not of the call."""
    from inweave.ops.device import choose_device, device_memory
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


CALLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"crops": plan_crops, "check": plan_run}


def without_folders(value: Any, folder: str) -> Any:
    """An answer without paths of this machine: pictures by their names."""
    if isinstance(value, str):
        return public(value.replace(f"{folder}/", "").replace(folder, "the dataset"))
    if isinstance(value, dict):
        return {without_folders(name, folder): without_folders(each, folder) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each, folder) for each in value]
    return value


def answer(message: Message) -> Message:
    """The answer to one call; our own errors travel with their code."""
    data = message.data
    try:
        return Message("answer", without_folders(CALLS[data["name"]](data), data["dataset"]))
    except Exception as error:
        if not isinstance(error, InweaveError):
            traceback.print_exc(file=sys.stderr)
        failure = failure_of(error).as_record()
        return Message("error", without_folders(failure, data["dataset"]))


def main() -> None:
    collect_less()
    answer_calls(lambda settings: None, answer)


if __name__ == "__main__":
    main()
