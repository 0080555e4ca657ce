"""Optimizers by the names that other trainers and their libraries give them, without case and punctuation.

bitsandbytes' 8-bit and paged variants are the same algorithms as the plain ones, with another storage of the state.
"""

from __future__ import annotations

from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import normalize_name, parse_number, parse_pairs, parse_scalar

#: our name -> theirs
_SPELLINGS: Final = {
    "adamw": "adamw adamwbf16 adamwfused optimiadamw bnbadamw pagedadamw pagedadamw32bit bnbadamwpaged torchadamw "
             "torchoptimadamw",
    "adamw8bit": "adamw8bit pagedadamw8bit bnbadamw8bit bnbadamw8bitpaged aoadamw8bit adamw8",
    "adafactor": "adafactor",
    "prodigy": "prodigy prodigyopt prodigy8bit",
    "schedulefree": "schedulefree adamwschedulefree schedulefreeadamw",
    "lion": "lion lion8bit pagedlion8bit optimilion bnblion bnblion8bit bnblionpaged bnblion8bitpaged",
    "came": "came came8bit",
    "dadapt_adam": "dadaptation dadapt dadaptadam",
    "dadapt_lion": "dadaptlion",
    "dadapt_sgd": "dadaptsgd",
    "dadapt_adan": "dadaptadan",
    "dadapt_adagrad": "dadaptadagrad",
    "torch.optim.SGD": "sgd sgdnesterov sgd8bit sgdnesterov8bit",
    "torch.optim.Adam": "adam adam8bit pagedadam pagedadam8bit bnbadam bnbadam8bit",
    "torch.optim.RAdam": "radam",
    "torch.optim.NAdam": "nadam",
    "torch.optim.Adagrad": "adagrad adagrad8bit bnbadagrad bnbadagrad8bit",
    "torch.optim.RMSprop": "rmsprop rmsprop8bit",
    "torch.optim.Adamax": "adamax",
    "torch.optim.Adadelta": "adadelta",
    "torch.optim.Rprop": "rprop",
    "torch.optim.ASGD": "asgd",
    "torch.optim.Muon": "torchoptimmuon",
}  # fmt: skip
_NAMES: Final = {theirs: ours for ours, names in _SPELLINGS.items() for theirs in names.split()}


def our_optimizer(name: Any) -> str | None:
    """Return our name of another trainer's optimizer or class; None if there is none."""
    return _NAMES.get(normalize_name(str(name).rpartition(".")[2])) or _NAMES.get(normalize_name(name))


def optimizer(out: Translation, name: str, value: Any) -> None:
    """Set the optimizer, or refuse its name."""
    if ours := our_optimizer(value):
        out.put(name, "optimizer", ours)
    else:
        out.refuse(name, f"{for_message(value)} is not supported", "optimizer")


def split_arguments(out: Translation, name: str, value: Any) -> dict[str, Any]:
    """Put name=value pairs that are settings of their own here; return the others."""
    rest: dict[str, Any] = {}
    for key, argument in parse_pairs(value).items():
        if key == "betas":
            listed = argument.strip("()[] ").split(",") if isinstance(argument, str) else argument
            out.put(f"{name}.betas", "betas", tuple(parse_number(each) for each in listed)[:2])
        elif key == "weight_decay" or (
            key == "eps" and not isinstance(argument, tuple | list) and "," not in str(argument)
        ):
            out.put(f"{name}.{key}", {"eps": "epsilon"}.get(key, key), parse_number(argument))
        else:  # a table has types of its own
            rest[key] = parse_scalar(argument) if isinstance(value, str | list | tuple) else argument
    out.mapping[name] = "optimizer_args"
    return rest


def optimizer_args(out: Translation, name: str, value: Any) -> None:
    """Set the options of an optimizer."""
    rest = split_arguments(out, name, value)
    if rest or not value:
        out.put(name, "optimizer_args", rest)
