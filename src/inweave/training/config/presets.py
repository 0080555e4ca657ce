"""Values that suit each model, for settings that the user leaves out: tables only.

A preset only names what differs from the defaults of `TrainConfig`: alpha is the rank, so that the learning rate means
the same at every rank; the working precision is bf16 while the trainable weights stay in float32; gradients are
clipped at 1. Presets for images are declared by their families (`inweave.models.families`).

llm     counts epochs, because texts differ in length far more than sets of images do.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Literal

from inweave.models.derived.family import FLOW, PRESETS
from inweave.models.families import families

_LANGUAGE_MODEL: Final[dict[str, Any]] = {
    "rank": 16,
    "learning_rate": 1e-4,
    "precision": "bf16",
    "max_grad_norm": 1.0,
    "targets": "all",
    "epochs": 3,
    "lr_scheduler": "linear",
    "warmup": 0.03,
}

#: optimizers that estimate one learning rate for everything; the setting is a factor of it
ADAPTIVE: Final = ("prodigy", "dadapt_adam", "dadapt_adagrad", "dadapt_adan", "dadapt_lion", "dadapt_sgd")
#: values that suit an optimizer, for settings that the user leaves out: those of its paper
OPTIMIZER_PRESETS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"learning_rate": 1.0} for name in ADAPTIVE},
    "lion": {"betas": (0.9, 0.99)},
    "dadapt_lion": {"learning_rate": 1.0, "betas": (0.9, 0.99)},
}

TARGETS: Final = ("attention", "attention-mlp", "all")


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return all presets by name."""
    of_images = {name: dict(preset) for family in families() for name, preset in family.presets.items()}
    return {**of_images, **{name: dict(preset) for name, preset in PRESETS.items()}, "llm": _LANGUAGE_MODEL}


def preset_objective(preset: str) -> Literal["noise", "flow"] | None:
    """Return what the denoiser of a preset's family predicts, noise or the direction of a flow; None for `llm`."""
    if preset in PRESETS:
        return "flow" if preset.startswith(FLOW) else "noise"
    family = next((family for family in families() if preset in family.presets), None)
    return None if family is None else "flow" if family.flow else "noise"
