"""The facts about a run in its checkpoint, validated before they are used.

    step, steps, batch_size, gradient_accumulation     whole numbers        config       a table of settings
    data                                               a digest             validation   [[step, loss], ...]
    base                                               digests by tensor, or one of sampled values (earlier versions)
    losses                                             of the last steps, a list of numbers
    compiled                                           whether the denoiser's blocks are compiled
    attention                                          the kernel for each shape, on a GPU; a table of names
    adapters                                           of steps before this one: a list of suffixes such as -000120
    skipped, skipped_in_a_row, split                   counters, as tensors of one whole number

A file can be complete, with correct checksums, and still not be a run's. The tensors of parameters and optimizer are
compared with the model's when they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inweave.checked import for_message
from inweave.errors import FormatError
from inweave.training.checkpoint.store import State

COUNTERS = ("skipped", "skipped_in_a_row", "split")
_DEFAULTS: dict[str, Any] = {
    "config": {},
    "data": "",
    "base": "",
    "started": 0,
    "validation": [],
    "losses": [],
    "compiled": False,
    "attention": {},
    "adapters": [],
}


def ensure_run_state(state: State) -> State:
    """Raise FormatError if a checkpoint was not written by a run."""
    if problem := next(_problems(_DEFAULTS | state.facts, state.step, state.tensors), None):
        raise FormatError(f"the checkpoint of step {state.step} was not written by a run: {problem}")
    return state


def _problems(facts: Mapping[str, Any], step: int, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    config, rows = facts["config"], facts["validation"]
    expected: list[tuple[str, object, str, bool]] = [
        ("step", facts["step"], "a whole number of 0 or more", _is_count(facts["step"], 0) and facts["step"] == step),
        ("config", config, "a table of settings", isinstance(config, dict)),
        ("data", facts["data"], "a digest", isinstance(facts["data"], str)),
        ("base", facts["base"], "digests", isinstance(facts["base"], str) or _is_names(facts["base"])),
        ("compiled", facts["compiled"], "true or false", isinstance(facts["compiled"], bool)),
        ("attention", facts["attention"], "a table of kernels", _is_names(facts["attention"])),
        ("started", facts["started"], "a time", _is_time(facts["started"])),
        ("adapters", facts["adapters"], "a list of suffixes of files", _is_suffixes(facts["adapters"])),
        ("validation", rows, "a list of steps and losses", isinstance(rows, list) and all(map(_is_validation, rows))),
    ]
    losses = facts["losses"]
    fits = isinstance(losses, list) and all(type(loss) in (int, float) for loss in losses)
    expected.append(("losses", losses, "a list of losses", fits))
    if isinstance(config, dict):
        counts = [name for name in ("steps", "batch_size", "gradient_accumulation") if name in config]
        expected += [(name, config[name], "a whole number of 1 or more", _is_count(config[name], 1)) for name in counts]
        precision = config.get("precision", "")
        expected.append(("precision", precision, "the name of a data type", isinstance(precision, str)))
    yield from (f"{name} is {for_message(value)}, expected {what}" for name, value, what, fits in expected if not fits)
    for name in COUNTERS:
        counter = tensors.get(name)
        if counter is None or counter.shape != () or counter.dtype != torch.int64:
            yield f"the counter {name!r} is missing, or is not one whole number"
        elif not (name == "split") <= int(counter) < 2**31:
            yield f"the counter {name!r} is {int(counter)}"


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_names(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _is_suffixes(value: object) -> bool:
    """Return whether a value is a list such as ["-000120"], with nothing that leads to another file."""
    return isinstance(value, list) and all(isinstance(each, str) and re.fullmatch(r"-\d{6,}", each) for each in value)


def _is_time(value: object) -> bool:
    """Return whether a value is a time within the range of dates."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**37


def _is_validation(row: object) -> bool:
    """Return whether a row is [step, loss]; a loss may be NaN."""
    return isinstance(row, list) and len(row) == 2 and _is_count(row[0], 0) and type(row[1]) in (int, float)
