"""What a configuration gets wrong, all at once: names, values, and values that contradict each other.

fields --pydantic--> types and limits --contradictions--> a configuration, or every problem in one `ConfigError`
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from inweave.errors import ConfigError
from inweave.training.config.fields import Settings
from inweave.training.config.presets import TARGETS
from inweave.training.config.toml import for_message
from inweave.training.config.types import Rule, memory_bytes, regex_problem

S = TypeVar("S", bound=Settings)


def out_of_place(name: str, value: Any, kind: str | None) -> bool:
    """Whether a value is for the other kind of objective."""
    only_flow = {
        "timestep_shift": value is not None,
        "timestep_sampling": value not in ("auto", "uniform"),
        "guidance": value != 1.0,
    }
    only_noise = {"min_snr_gamma": value is not None, "noise_offset": value != 0.0}
    return bool(only_flow.get(name) if kind == "noise" else only_noise.get(name) if kind == "flow" else False)


def meant_for(kind: str | None) -> str:
    return "is for flow models" if kind == "noise" else "is for models that predict noise (epsilon, v_prediction)"


def contradictions(config: Settings) -> list[tuple[tuple[str, ...], str]]:
    """(fields, what is wrong with them together)."""
    c = config
    found: list[tuple[tuple[str, ...], str]] = []

    def no(bad: bool, told: str, *fields: str) -> None:
        if bad:
            found.append((fields, told))

    no(bool(c.steps and c.epochs), "steps and epochs: both are given; keep one", "steps", "epochs")
    no(c.cache_text and c.train_text_encoders, "cache_text: captions cannot be encoded once while train_text_encoders changes "
       "what encodes them; set cache_text = false, or train_text_encoders = false", "cache_text", "train_text_encoders")  # fmt: skip
    no(not (c.train_denoiser or c.train_text_encoders), "train_denoiser and train_text_encoders: nothing is left to train; "
       "set one of them to true", "train_denoiser", "train_text_encoders")  # fmt: skip
    no(c.network == "lora" and bool(c.conv_rank or c.conv_alpha), 'conv_rank, conv_alpha: network = "lora" has no '
       'convolutions; set network = "locon"', "network", "conv_rank", "conv_alpha")  # fmt: skip
    no(
        c.network != "lokr" and c.lokr_factor != -1,
        f'lokr_factor: is of network = "lokr", not "{c.network}"',
        "network",
        "lokr_factor",
    )
    no(
        c.shard and c.vram is not None,
        "shard: what a part of the base needs is not estimated; leave vram out",
        "shard",
        "vram",
    )
    no(c.shard and not c.train_denoiser, "shard: spreads the denoiser, and needs it to be trained; set train_denoiser = true, "
       "or shard = false", "shard", "train_denoiser")  # fmt: skip
    no(
        c.cosine_cycles > 1 and c.lr_scheduler != "cosine",
        'cosine_cycles: needs lr_scheduler = "cosine"',
        "cosine_cycles",
        "lr_scheduler",
    )
    no(bool(c.max_bucket and c.max_bucket < c.min_bucket), f"max_bucket: {c.max_bucket} is below min_bucket, "
       f"{c.min_bucket}", "min_bucket", "max_bucket")  # fmt: skip
    no(c.patience > 0 and c.validation_split == 0, "patience: counts validations; set validation_split, the fraction held "
       "out, such as 0.05", "patience", "validation_split")  # fmt: skip
    no(
        c.warmup >= 1 and c.warmup != int(c.warmup),
        f"warmup: whole steps, or a share below 1, got {c.warmup}",
        "warmup",
    )
    no(c.timestep_shift is not None and c.timestep_sampling not in ("auto", "shift"),
       f'timestep_shift: needs timestep_sampling = "shift", not "{c.timestep_sampling}"', "timestep_shift", "timestep_sampling")  # fmt: skip
    for name in ("timestep_shift", "timestep_sampling", "guidance", "min_snr_gamma", "noise_offset"):
        no(out_of_place(name, getattr(c, name), c.kind), f'{name}: {meant_for(c.kind)}, not for objective = "{c.objective}"',
           name, "objective")  # fmt: skip
    for name in sorted({"weight_decay", "betas", "eps", "lr"} & c.optimizer_args.keys()):
        field = {"eps": "epsilon", "lr": "learning_rate"}.get(name, name)
        no(True, f"optimizer_args: {name} has a field of its own, {field}", "optimizer_args")
    listed = () if c.targets in TARGETS else (c.targets,) if isinstance(c.targets, str) else c.targets
    for each in listed:
        no(bool(wrong := regex_problem(each)), f"targets: {wrong}", "targets")
    if c.vram not in (None, "auto"):
        try:
            memory_bytes(str(c.vram))
        except ConfigError as error:
            no(True, f"vram: {error}", "vram")
    return found


class Contradictions(ValueError):
    """Raised inside validation, where only a ValueError is collected."""

    def __init__(self, found: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(told for _, told in found))
        self.found = found


#: TOML's names for the types that pydantic names
_IN_TOML = {"valid tuple": "list", "valid dictionary or instance of Rule": "table", "valid dictionary": "table"}


def validate(model: type[S], fields: Mapping[str, Any], labels: Mapping[str, str], problems: Iterable[str]) -> S:
    """The configuration of ``fields``; ``labels``: our name -> the one the user wrote; ``problems`` known before."""
    problems, fields = list(problems), dict(fields)
    bad: set[str] = set()
    while True:
        try:
            config = model.model_validate(fields)
        except ValidationError as error:
            failed = {str(each["loc"][0]) for each in error.errors(include_url=False) if each["loc"]}
            for each in error.errors():
                problems += _messages(each, labels, bad)
            if not failed:
                break
            # once more without them, so that what the others contradict is reported too
            bad |= failed
            fields = {"dataset": "-", **{name: value for name, value in fields.items() if name not in failed}}
            continue
        if not problems:
            return config
        break
    raise ConfigError(problems)


def _messages(problem: Any, labels: Mapping[str, str], bad: set[str]) -> Iterable[str]:
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, Contradictions):
        return [told for fields, told in raised.found if not bad & set(fields)]
    path = [str(part) for part in problem["loc"]]
    label = ".".join(path)
    if path[0] in labels:
        label = f"{labels[path[0]]} ({label})"
    if problem["type"] == "extra_forbidden":
        names = Rule.model_fields if len(path) > 1 else Settings.model_fields
        return [f"{label}: there is no such setting{did_you_mean(path[-1], names)}"]
    if problem["type"] == "missing":
        return [f"{label}: is needed" + (f"; {Settings.model_fields['dataset'].description}" if path[1:] == [] else "")]
    told = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ").strip()
    for pydantic, plain in _IN_TOML.items():
        told = told.replace(pydantic, plain)
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
        told += f", got {for_message(problem['input'])}{did_you_mean(problem['input'], choices)}"
    return [f"{label}: {told}" if "got" in told else f"{label}: {told}, got {for_message(problem['input'])}"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:100], list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
