"""diffusion-pipe's [optimizer]: classes of torch, bitsandbytes, optimi and pytorch_optimizer, with their defaults.

    beta2_half_life    beta2 = 0.5 ^ (examples of a step / half life)
    SDXL               unet_lr, text_encoder_1_lr and text_encoder_2_lr in [model]; lr where one is not set; 0 trains
                       nothing

What keeps bfloat16 weights exact (Kahan sums) has nothing to do here, where trained weights are in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, normalize_name, parse_number, parse_scalar
from inweave.training.importers.defaults import defaults
from inweave.training.importers.diffusion_pipe.datasets import batch_sizes
from inweave.training.importers.optimizers import with_library_defaults

_NAMES: Final = {
    "adamw": "adamw", "adamwoptimi": "adamw", "offload": "adamw", "adamw8bit": "adamw8bit",
    "adamw8bitkahan": "adamw8bit", "sgd": "torch.optim.SGD", "prodigy": "prodigy", "lion": "lion",
}  # fmt: skip
_READ: Final = ("type", "lr", "betas", "eps", "weight_decay", "beta2_half_life", "gradient_release")
_STORAGE: Final = ("foreach", "fused", "kahan_sum", "offload_gradients")
#: theirs -> the same option of the class used here
_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "prodigy": {**{name: name for name in ("d0", "d_coef", "growth_rate", "safeguard_warmup", "beta3")},
                "bias_correction": "use_bias_correction", "weight_decouple": "decouple"},
    "sgd": {name: name for name in ("momentum", "dampening", "nesterov")},
}  # fmt: skip


def optimizer_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the library of an optimizer."""
    kind = normalize_name(settings.get("optimizer.type"))
    return {f"optimizer.{name}": value for name, value in defaults("diffusion_pipe", f"optimizers.{kind}").items()}


def put_optimizer(out: Translation) -> None:
    """Set the optimizer and its options; refuse other algorithms, and options that it does not have here."""
    kind = out.word("optimizer.type")
    for name in ("gradient_release", "stabilize"):
        if out.is_on(f"optimizer.{name}"):
            why = "each layer is updated in each micro-batch, without clipping"
            out.refuse_value(f"optimizer.{name}", why if name == "gradient_release" else "updates are not stabilized")
    if (ours := _NAMES.get(kind)) is None:
        out.refuse_value("optimizer.type", "is not supported", "optimizer")
        return
    out.put("optimizer.type", "optimizer", ours)
    _put_betas(out)
    options = {}
    for name, value in out.settings.items():
        place, _, key = name.partition(".")
        if place != "optimizer" or key in _READ or key.startswith("betas"):
            continue
        if key in _STORAGE or (key == "stabilize" and is_off(value)):
            out.unset.append(name)
        elif (same := _OPTIONS.get(kind, {}).get(key)) is not None:
            options[same] = parse_scalar(value)
        elif key != "stabilize":
            out.refuse_value(name, f"{ours} has no such option here")
    if options:
        out.fields["optimizer_args"] = options
    with_library_defaults(out)


def _put_betas(out: Translation) -> None:
    betas = out.get("optimizer.betas")
    if not isinstance(betas, list) or len(betas) != 2:
        if betas is not None:
            out.problems.append(f"optimizer.betas: expected two numbers, got {for_message(betas)}")
        return
    first, second = map(parse_number, betas)
    if out.is_on("optimizer.beta2_half_life"):
        examples = batch_sizes(out)[0][1] * parse_number(out.get("gradient_accumulation_steps"))
        second = 0.5 ** (examples / parse_number(out.get("optimizer.beta2_half_life")))
    out.put("optimizer.betas", "betas", (first, second))


def put_rates(out: Translation) -> None:
    """Set the learning rates; of SDXL, those of its three networks."""
    base = out.get("optimizer.lr")
    if base is None and out.word("optimizer.type") in _NAMES and out.get("force_constant_lr") is None:
        out.problems.append(f"optimizer.lr: is missing, and {for_message(out.get('optimizer.type'))} has no default")
    names = ("model.unet_lr", "model.text_encoder_1_lr", "model.text_encoder_2_lr")
    rates = [out.get(name, base) if out.family == "sdxl" else base for name in names]
    unet, *encoders = [None if rate is None else parse_number(rate) for rate in rates]
    if out.family == "sdxl":
        trained = [rate for rate in encoders if rate != 0]
        out.fields["train_text_encoders"] = bool(trained)
        if trained and trained[0] is not None:
            out.fields["text_encoder_learning_rate"] = trained[0]
        for number, rate in enumerate(encoders, 1):
            if rate == 0 and trained:
                out.add_rules(names[number], [{"pattern": rf"^te{number}\.", "skip": True}])
            elif rate is not None and trained and rate != trained[0]:
                out.add_rules(names[number], [{"pattern": rf"^te{number}\.", "learning_rate": rate}])
    if unet == 0:
        out.fields["train_denoiser"] = False
    elif unet is not None:
        out.fields["learning_rate"] = unet
    out.mapping |= {name: "learning_rate" for name in ("optimizer.lr", *names) if name in out.settings}
