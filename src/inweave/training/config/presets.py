"""What suits each model where the user sets nothing: tables only.

A preset only names what differs from the defaults of `TrainConfig`: alpha is the rank, so that the learning rate means
the same at every rank; the working precision is bf16 while the trainable weights stay in float32; gradients are
clipped at 1. Presets for images are declared by their families (`inweave.models.families`).

llm     counts epochs, because texts differ in length far more than sets of images do.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from inweave.models.families import FAMILIES

PRESETS: Final[dict[str, dict[str, Any]]] = {
    **{name: dict(preset) for family in FAMILIES for name, preset in family.presets.items()},
    "llm": {
        "rank": 16,
        "learning_rate": 1e-4,
        "precision": "bf16",
        "max_grad_norm": 1.0,
        "targets": "all",
        "epochs": 3,
        "lr_scheduler": "linear",
        "warmup": 0.03,
    },
}

#: optimizers that estimate one learning rate for everything; the setting is a factor of it
ADAPTIVE: Final = ("prodigy", "dadapt_adam", "dadapt_adagrad", "dadapt_adan", "dadapt_lion", "dadapt_sgd")
#: what suits an optimizer where the user sets nothing: the numbers of its paper
OPTIMIZER_PRESETS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"learning_rate": 1.0} for name in ADAPTIVE},
    "lion": {"betas": (0.9, 0.99)},
    "dadapt_lion": {"learning_rate": 1.0, "betas": (0.9, 0.99)},
}

TARGETS: Final = ("attention", "attention-mlp", "all")

#: what the denoiser of a preset's family predicts: noise, or the direction of a flow; a language model predicts neither
KINDS: Final[dict[str, Literal["noise", "flow"]]] = {
    name: "flow" if family.flow else "noise" for family in FAMILIES for name in family.presets
}
