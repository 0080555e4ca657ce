"""What suits each family of models where the user sets nothing: tables only.

A preset only names what differs from the defaults of `TrainConfig`: alpha is the rank, so that the learning rate means
the same at every rank; the working precision is bf16 while the weights that learn stay in float32; gradients are
clipped at 1.

sdxl    min-SNR 5 evens out the steps, so that faces and composition learn at one pace. SDXL's own last stage was trained
        with offset noise (0.05); an adapter trained without any slowly takes the dark and the light ends away again.
        0.0357 keeps them and is weak enough not to shift the brightness of a short run.
sd2     comes in two sizes, 512 and 768 pixels; the model's own is used.
sd3     was made with logit-normal timesteps and a shift of 3; its adapters learn on the same ones.
flux    shifts by resolution, and is distilled on guidance: 1 in training leaves that distillation alone.
llm     counts epochs, because texts differ in length far more than sets of pictures do.
"""

from __future__ import annotations

from typing import Any, Final, Literal

_PICTURES: dict[str, Any] = {
    "rank": 16,
    "learning_rate": 1e-4,
    "precision": "bf16",
    "max_grad_norm": 1.0,
    "targets": "attention-mlp",
    "steps": 2000,
}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "inweave/emoji": {
        "rank": 8,
        "learning_rate": 2e-3,  # high for a short run, so it rises and falls
        "lr_scheduler": "cosine",
        "warmup": 20,
        "steps": 300,
        "batch_size": 2,
        "resolution": 128,
        "bucket_step": 32,
        "targets": "attention-mlp",
        "precision": "fp32",
        "caption_dropout": 0.1,
    },
    "sd": {**_PICTURES, "resolution": 512, "text_encoder_learning_rate": 5e-5},
    "sd2": {**_PICTURES, "text_encoder_learning_rate": 5e-5},
    "sdxl": {
        **_PICTURES,
        "resolution": 1024,
        "min_snr_gamma": 5.0,
        "noise_offset": 0.0357,
        "text_encoder_learning_rate": 1e-5,
    },
    "sd3": {**_PICTURES, "resolution": 1024, "timestep_sampling": "shift", "timestep_shift": 3.0},
    "flux": {**_PICTURES, "resolution": 1024, "timestep_sampling": "shift", "guidance": 1.0},
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

TARGETS: Final = ("attention", "attention-mlp", "all")

#: what a family's denoiser is taught by: noise, or the direction of a flow; a language model by neither
KINDS: Final[dict[str, Literal["noise", "flow"]]] = {
    "inweave/emoji": "noise", "sd": "noise", "sd2": "noise", "sdxl": "noise", "sd3": "flow", "flux": "flow",
}  # fmt: skip
