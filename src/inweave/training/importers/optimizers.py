"""Optimizers of other trainers in an import, with the options that their library sets.

Each library gives an optimizer its own betas, epsilon and weight decay. What a trainer leaves to the library is written
down by `with_library_defaults`, so that our defaults are never used in its place.
"""

from __future__ import annotations

from typing import Any

from inweave.checked import for_message
from inweave.training.config.optimizer_names import optimizer as named_optimizer
from inweave.training.config.optimizer_names import our_optimizer, split_arguments
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, normalize_name, number_or

#: packages whose classes have the names in our table
_PACKAGES = names(
    "torch bitsandbytes transformers lion_pytorch prodigyopt dadaptation schedulefree came_pytorch pytorch_optimizer"
)
#: names of D-Adaptation in its preprint
_PREPRINT = ("dadaptation", "dadaptadampreprint")
#: options that a trainer always passes to an optimizer of that name, unless the file sets them
_NESTEROV = {"nesterov": True, "momentum": 0.9}
_IMPLIED_ARGS: dict[str, dict[str, Any]] = {"sgdnesterov": _NESTEROV, "sgdnesterov8bit": _NESTEROV}

#: (weight decay, betas, epsilon) of an optimizer's library; most of torch.optim and D-Adaptation have the usual ones
_USUAL = (0.0, (0.9, 0.999), 1e-8)
_ADAMW = (0.01, (0.9, 0.999), 1e-8)
_LIBRARY: dict[str, tuple[float, tuple[float, float], float]] = {
    **dict.fromkeys(names("prodigy schedulefree adafactor came dadapt_adam dadapt_adagrad dadapt_sgd"), _USUAL),
    "adamw": _ADAMW, "adamw8bit": _ADAMW,
    "lion": (0.0, (0.9, 0.99), 1e-8), "dadapt_lion": (0.0, (0.9, 0.99), 1e-8),
    "dadapt_adan": (0.02, (0.98, 0.92), 1e-8),
    "torch.optim.Adagrad": (0.0, (0.9, 0.999), 1e-10), "torch.optim.Adadelta": (0.0, (0.9, 0.999), 1e-6),
    "torch.optim.Muon": (0.1, (0.9, 0.999), 1e-7),
}  # fmt: skip
#: switches of a library's implementation that do not change the numbers
_IMPLEMENTATION = names(
    "foreach fused capturable differentiable is_paged block_wise min_8bit_size percentile_clipping optim_bits "
    "fsdp_in_use log_every quant_block_size use_triton stochastic_rounding compile fused_back_pass slice_p "
    "state_precision"
)
#: options of an optimizer that are fixed here, and their values
_FIXED_ADAMW: dict[str, Any] = {"amsgrad": False, "maximize": False, "decouple": True, "use_bias_correction": True}
_FIXED: dict[str, dict[str, Any]] = {
    "adamw": _FIXED_ADAMW, "adamw8bit": _FIXED_ADAMW,
    "adafactor": {"relative_step": False, "warmup_init": False, "clip_threshold": 1.0, "decay_rate": -0.8},
}  # fmt: skip


def optimizer(out: Translation, name: str, value: Any) -> None:
    """Set the optimizer; refuse other algorithms, and classes of unknown packages."""
    package = str(value).partition(".")[0] if "." in str(value) else ""
    if class_name(value) in _PREPRINT:
        why = "is DAdaptAdamPreprint, an older algorithm than DAdaptAdam"
        out.refuse(name, f"{for_message(value)} {why}", "optimizer")
    elif package and package not in _PACKAGES:
        out.refuse(name, f"{for_message(value)} is a class of a package that is not known here", "optimizer")
    else:
        named_optimizer(out, name, value)


def optimizer_args(out: Translation, name: str, value: Any) -> None:
    """Set the options of an optimizer; refuse those that it does not have here."""
    theirs = out.get("optimizer_type") or out.get("optimizer")
    rest = split_arguments(out, name, value)
    kind = str(out.fields.get("optimizer") or our_optimizer(theirs) or "")
    fixed, options = _FIXED.get(kind, {}), {}
    for key, argument in rest.items():
        if key in _IMPLEMENTATION:
            out.note(f"{name}.{key}", "only affects how the optimizer computes")
        elif key in fixed and (argument == fixed[key] or (fixed[key] is False and is_off(argument))):
            out.note(f"{name}.{key}", "is always the case here")
        elif key in fixed or kind in ("adamw", "adamw8bit"):
            out.refuse(f"{name}.{key}", f"{for_message(argument)}: {kind} has no such option here")
        else:
            options[key] = argument
    if options or not value:
        out.put(name, "optimizer_args", options)


def class_name(value: Any) -> str:
    """Return the name of an optimizer without its package, case and punctuation."""
    return normalize_name(str(value).rpartition(".")[2])


def with_library_defaults(out: Translation, theirs: Any = None) -> None:
    """Set what a file leaves to the library: weight decay, betas, epsilon, and options implied by ``theirs``."""
    name = str(out.fields.get("optimizer", "adamw"))
    decay, betas, epsilon = _LIBRARY.get(name, _USUAL if name.startswith("torch.optim.") else _ADAMW)
    if implied := _IMPLIED_ARGS.get(class_name(theirs)):
        out.fields["optimizer_args"] = {**implied, **out.fields.get("optimizer_args", {})}
    out.fields.setdefault("weight_decay", decay)
    out.fields.setdefault("betas", betas)
    out.fields.setdefault("epsilon", epsilon)


def put_betas(out: Translation, name: str, *values: Any) -> None:
    """Set both betas of Adam from settings of their own; none: the usual ones."""
    first, second = values
    out.put(name, "betas", (number_or(first, 0.9), number_or(second, 0.999)))
