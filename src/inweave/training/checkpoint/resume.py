"""Whether a run that goes on is the one that began: the same settings, data and base, as far as they decide numbers.

    settings   those that say resume="same"; more steps, or fewer, if every step so far had the rate it would have now
    data       what the pictures and captions are, wherever they lie
    base       numbers taken from every weight of the model, wherever it lies

Where data and base are the same, their paths may differ. A run from before bases were noted goes by the path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from inweave.errors import ConfigError
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig
from inweave.training.data.cache import sample_bits, tensor_bits
from inweave.training.optim.schedules import rates


def base_of(networks: Mapping[str, nn.Module]) -> str:
    """A digest of weights before adapters are on them."""
    digest = hashlib.sha256()
    for folder, network in sorted(networks.items()):
        for key, value in network.state_dict().items():
            told = (folder, key, str(value.dtype), tuple(value.shape), sample_bits(tensor_bits(value)))
            digest.update(str(told).encode())
    return digest.hexdigest()


def check_same(then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int) -> None:
    """Raise where the facts of a checkpoint of ``step`` are those of another run, and say of everything why."""
    before, today = dict(then.get("config", {})), dict(now["config"])
    total = today["steps"]
    if before.get("steps") and step <= total and rates(config, before["steps"], step) == rates(config, total, step):
        before["steps"] = total
    noted = "base" in then
    by_content = names_where(resume="content") if noted else {"dataset"}
    free = names_where(resume="free") | by_content
    problems = [
        f"{name}: this run was started with {before.get(name)!r}, now it is {today.get(name)!r}; "
        "resume with the same value, or start a new run under another name"
        for name in sorted({*before, *today} - free)
        if before.get(name) != today.get(name)
    ]
    if not problems and then.get("data") != now["data"]:
        problems.append("dataset: it is not the one this run was started with; start a new run under another name")
    if not problems and noted and then["base"] != now["base"]:
        problems.append(
            "model: its weights are not those this run was started with; start a new run under another name"
        )
    if problems:
        raise ConfigError(problems)
