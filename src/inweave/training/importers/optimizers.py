"""Optimizers and schedules of other trainers, with the options they have there unless a file sets them.

Each library gives an optimizer its own betas, epsilon and weight decay. What a trainer leaves to the library is written
down by `with_library_defaults`, so that ours are never used in its place. bitsandbytes' 8-bit and paged variants are one
algorithm with the plain ones; they differ in how the state is stored.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.fields import Settings
from inweave.training.importers.translate import Translation, choice
from inweave.training.importers.values import is_off, normalize_name, parse_number, parse_pairs, parse_scalar

#: their name -> ours, the one that keeps the state in the same way first
_NAMES: dict[str, tuple[str, ...]] = {
    "adamw": ("adamw",), "adamwbf16": ("adamw",), "adamwfused": ("adamw",), "optimiadamw": ("adamw",),
    "bnbadamw": ("adamw",), "pagedadamw": ("adamw",), "pagedadamw32bit": ("adamw",), "bnbadamwpaged": ("adamw",),
    "torchadamw": ("adamw",), "torchoptimadamw": ("adamw",),
    "adamw8bit": ("adamw8bit",), "pagedadamw8bit": ("adamw8bit",), "bnbadamw8bit": ("adamw8bit",),
    "bnbadamw8bitpaged": ("adamw8bit",), "aoadamw8bit": ("adamw8bit",), "adamw8": ("adamw8bit",),
    "adafactor": ("adafactor",), "prodigy": ("prodigy",), "schedulefree": ("schedulefree",),
    "adamwschedulefree": ("schedulefree",), "schedulefreeadamw": ("schedulefree",),
    "lion": ("lion",), "lion8bit": ("lion8bit", "lion"), "pagedlion8bit": ("lion8bit", "lion"), "optimilion": ("lion",),
    "bnblion": ("lion",), "bnblion8bit": ("lion8bit", "lion"), "bnblionpaged": ("lion",),
    "bnblion8bitpaged": ("lion8bit", "lion"),
    "came": ("came",), "came8bit": ("came8bit", "came"),
    "dadaptation": ("dadapt_adam", "dadaptation", "dadaptadam"), "dadapt": ("dadapt_adam", "dadaptation", "dadaptadam"),
    "dadaptadam": ("dadapt_adam", "dadaptation", "dadaptadam"), "dadaptlion": ("dadapt_lion", "dadaptlion"),
    "dadaptsgd": ("dadapt_sgd", "dadaptsgd"), "dadaptadan": ("dadapt_adan", "dadaptadan"),
    "dadaptadagrad": ("dadapt_adagrad", "dadaptadagrad"),
    "sgdnesterov": ("torch.optim.SGD", "sgd"), "sgd": ("torch.optim.SGD", "sgd"), "adam": ("torch.optim.Adam", "adam"),
    "sgdnesterov8bit": ("torch.optim.SGD",), "sgd8bit": ("torch.optim.SGD",),
    "adam8bit": ("torch.optim.Adam",), "pagedadam": ("torch.optim.Adam",), "pagedadam8bit": ("torch.optim.Adam",),
    "bnbadam": ("torch.optim.Adam",), "bnbadam8bit": ("torch.optim.Adam",),
    "radam": ("torch.optim.RAdam",), "nadam": ("torch.optim.NAdam",), "adagrad": ("torch.optim.Adagrad",),
    "adagrad8bit": ("torch.optim.Adagrad",), "bnbadagrad": ("torch.optim.Adagrad",), "bnbadagrad8bit": ("torch.optim.Adagrad",),
    "rmsprop": ("torch.optim.RMSprop",), "rmsprop8bit": ("torch.optim.RMSprop",), "adamax": ("torch.optim.Adamax",),
    "adadelta": ("torch.optim.Adadelta",), "rprop": ("torch.optim.Rprop",), "asgd": ("torch.optim.ASGD",),
    "torchoptimmuon": ("torch.optim.Muon",), "prodigyopt": ("prodigy",), "prodigy8bit": ("prodigy",),
}  # fmt: skip
#: packages whose classes are those that the names stand for
_PACKAGES = frozenset({
    "torch", "bitsandbytes", "transformers", "lion_pytorch", "prodigyopt", "dadaptation", "schedulefree", "came_pytorch",
    "pytorch_optimizer",
})  # fmt: skip
#: names of D-Adaptation as its preprint has it
_PREPRINT = ("dadaptation", "dadaptadampreprint")
#: what a trainer always gives to an optimizer of that name, unless its options say otherwise
_IMPLIED_ARGS: dict[str, dict[str, Any]] = {
    "sgdnesterov": {"nesterov": True, "momentum": 0.9}, "sgdnesterov8bit": {"nesterov": True, "momentum": 0.9},
}  # fmt: skip

#: (weight decay, betas, epsilon) of the library that an optimizer comes from
_LIBRARY: dict[str, tuple[float, tuple[float, float], float]] = {
    "adamw": (0.01, (0.9, 0.999), 1e-8), "adamw8bit": (0.01, (0.9, 0.999), 1e-8), "prodigy": (0.0, (0.9, 0.999), 1e-8),
    "schedulefree": (0.0, (0.9, 0.999), 1e-8), "adafactor": (0.0, (0.9, 0.999), 1e-8), "lion": (0.0, (0.9, 0.99), 1e-8),
    "lion8bit": (0.0, (0.9, 0.99), 1e-8), "came": (0.0, (0.9, 0.999), 1e-8), "dadapt_adam": (0.0, (0.9, 0.999), 1e-8),
    "dadapt_adagrad": (0.0, (0.9, 0.999), 1e-8), "dadapt_sgd": (0.0, (0.9, 0.999), 1e-8),
    "dadapt_lion": (0.0, (0.9, 0.99), 1e-8), "dadapt_adan": (0.02, (0.98, 0.92), 1e-8),
    "torch.optim.Adagrad": (0.0, (0.9, 0.999), 1e-10), "torch.optim.Adadelta": (0.0, (0.9, 0.999), 1e-6),
    "torch.optim.Muon": (0.1, (0.9, 0.999), 1e-7),
}  # fmt: skip
#: Adam, NAdam, RAdam, Adamax, RMSprop, SGD, Rprop and ASGD of torch.optim, where they have them
_TORCH = (0.0, (0.9, 0.999), 1e-8)

SCHEDULES = {
    "constant": "constant", "constantwithwarmup": "constant", "linear": "linear", "polynomial": "polynomial",
    "cosine": "cosine", "cosinewithrestarts": "cosine", "cosinewithhardrestarts": "cosine",
}  # fmt: skip
lr_scheduler = choice("lr_scheduler", SCHEDULES)
#: switches of a library's implementation that do not change the numbers
_IMPLEMENTATION = frozenset({
    "foreach", "fused", "capturable", "differentiable", "is_paged", "block_wise", "min_8bit_size", "percentile_clipping",
    "optim_bits", "fsdp_in_use", "log_every", "quant_block_size", "use_triton", "stochastic_rounding", "compile",
    "fused_back_pass", "slice_p", "state_precision",
})  # fmt: skip
_NEUTRAL_VALUES = {"percentile_clipping": 100, "maximize": False, "amsgrad": False}


def our_optimizer(name: Any) -> str | None:
    """Our name of another trainer's optimizer; None where there is none."""
    annotation = Settings.model_fields["optimizer"].annotation
    known = typing.get_args(annotation)
    candidates = _NAMES.get(normalize_name(str(name).rpartition(".")[2]), ()) + _NAMES.get(normalize_name(name), ())
    for candidate in candidates:
        if candidate in known or (annotation is str and _accepted(candidate)):
            return candidate
    return None


def _accepted(name: str) -> bool:
    """Whether the field itself takes a name, where it is not a list of them."""
    try:
        values: dict[str, Any] = {"dataset": "-", "optimizer": name}
        Settings(**values)
    except Exception:  # whatever the field refuses it with
        return False
    return True


def optimizer(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    out.optimizer_name = normalize_name(str(value).rpartition(".")[2])
    if out.exact and out.optimizer_name in _PREPRINT:
        out.refuse(
            name, f"{for_message(value)} is DAdaptAdamPreprint there, an older algorithm than DAdaptAdam", "optimizer"
        )
        return
    package = str(value).partition(".")[0] if "." in str(value) else ""
    if out.exact and package and package not in _PACKAGES:
        out.refuse(name, f"{for_message(value)} is a class of a package that is not known here", "optimizer")
    elif ours := our_optimizer(value):
        out.put(name, "optimizer", ours)
    else:
        out.refuse(name, f"{for_message(value)} is not supported", "optimizer")


def optimizer_args(out: Translation, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    """name=value pairs of an optimizer: those that are settings of their own here, and the others."""
    rest: dict[str, Any] = {}
    for key, argument in parse_pairs(value).items():
        if key == "betas":
            listed = argument.strip("()[] ").split(",") if isinstance(argument, str) else argument
            out.put(f"{name}.betas", "betas", tuple(parse_number(each) for each in listed)[:2])
        elif key == "weight_decay" or (
            key == "eps" and not isinstance(argument, tuple | list) and "," not in str(argument)
        ):
            out.put(f"{name}.{key}", {"eps": "epsilon"}.get(key, key), parse_number(argument))
        elif out.exact and key in _IMPLEMENTATION:
            out.note(f"{name}.{key}", "only affects how the optimizer computes")
        else:
            rest[key] = (
                argument if isinstance(value, Mapping) else parse_scalar(argument)
            )  # a table has types of its own
    out.mapping[name] = "optimizer_args"
    if out.exact:
        theirs = settings.get("optimizer_type") or settings.get("optimizer")
        rest = _known_args(out, name, rest, str(out.fields.get("optimizer") or our_optimizer(theirs) or ""))
    if rest or not value:
        out.put(name, "optimizer_args", rest)


def _known_args(out: Translation, name: str, rest: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The options that our optimizer has too; adafactor's relative steps are another algorithm."""
    options: dict[str, Any] = {}
    for key, value in rest.items():
        usual = _USUAL.get(kind, {}).get(key)
        if usual is not None and (value in usual or (False in usual and is_off(value))):
            out.note(f"{name}.{key}", "is always the case here")
        elif usual is not None or kind in ("adamw", "adamw8bit"):
            out.refuse(f"{name}.{key}", f"{for_message(value)}: {kind} has no such option here")
        else:
            options[key] = value
    return options


#: options of an optimizer that are fixed here, and their values
_ADAMW: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "decouple": (True,),
    "use_bias_correction": (True,),
}
_USUAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "adamw": _ADAMW, "adamw8bit": _ADAMW,
    "adafactor": {"relative_step": (False,), "warmup_init": (False,), "clip_threshold": (1.0,), "decay_rate": (-0.8,)},
}  # fmt: skip


def with_library_defaults(out: Translation) -> None:
    """What a file leaves to the library: its weight decay, betas and epsilon."""
    name = str(out.fields.get("optimizer", "adamw"))
    decay, betas, epsilon = _LIBRARY.get(name, _TORCH if name.startswith("torch.optim.") else _LIBRARY["adamw"])
    if implied := _IMPLIED_ARGS.get(out.optimizer_name):
        out.fields["optimizer_args"] = {**implied, **out.fields.get("optimizer_args", {})}
    out.fields.setdefault("weight_decay", decay)
    out.fields.setdefault("betas", betas)
    out.fields.setdefault("epsilon", epsilon)
