"""What suits each family of models where the user says nothing, and which settings do not go together.

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

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inweave.errors import ConfigError
from inweave.training.config.importers.translate import shown

if TYPE_CHECKING:
    from inweave.training.config.schema import TrainConfig

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
        "schedule": "cosine",
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
    "sd3": {**_PICTURES, "resolution": 1024, "timesteps": "shift", "shift": 3.0},
    "flux": {**_PICTURES, "resolution": 1024, "timesteps": "shift", "guidance": 1.0},
    "llm": {
        "rank": 16,
        "learning_rate": 1e-4,
        "precision": "bf16",
        "max_grad_norm": 1.0,
        "targets": "all",
        "epochs": 3,
        "schedule": "linear",
        "warmup": 0.03,
    },
}

TARGETS: Final = ("attention", "attention-mlp", "all")

#: what a family's denoiser is taught by: noise, or the direction of a flow; a language model by neither
KINDS: Final[dict[str, Literal["noise", "flow"]]] = {
    "inweave/emoji": "noise", "sd": "noise", "sd2": "noise", "sdxl": "noise", "sd3": "flow", "flux": "flow",
}  # fmt: skip


class Rule(BaseModel):
    """What holds for the modules a pattern finds; the first rule that matches a module wins."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pattern: str = Field(description="a regular expression, searched in dotted module names")
    rank: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description="their rank")
    alpha: Annotated[float, Field(gt=0)] | None = Field(None, description="their alpha; without it, their rank")
    learning_rate: Annotated[float, Field(gt=0)] | None = Field(None, description="their learning rate")
    skip: bool = Field(False, description="they are not trained")

    @field_validator("pattern")
    @classmethod
    def _readable(cls, value: str) -> str:
        if wrong := not_a_regex(value):
            raise ValueError(wrong)
        return value

    @model_validator(mode="after")
    def _says_one_thing(self) -> Rule:
        said = [name for name in ("rank", "alpha", "learning_rate") if getattr(self, name) is not None]
        if self.skip and said:
            raise ValueError(f"skips its modules, and yet sets {', '.join(said)}")
        if not self.skip and not said:
            raise ValueError("says nothing; set rank, alpha, learning_rate or skip")
        return self


def out_of_place(name: str, value: Any, kind: str | None) -> bool:
    """Whether a value is for the other kind of objective."""
    only_flow = {"shift": value is not None, "timesteps": value not in ("auto", "uniform"), "guidance": value != 1.0}
    only_noise = {"min_snr_gamma": value is not None, "noise_offset": value != 0.0}
    return bool(only_flow.get(name) if kind == "noise" else only_noise.get(name) if kind == "flow" else False)


def meant_for(kind: str | None) -> str:
    return "is for flow models" if kind == "noise" else "is for models that predict noise (epsilon, v_prediction)"


def contradictions(config: TrainConfig) -> list[tuple[tuple[str, ...], str]]:
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
        c.network != "lokr" and c.factor != -1,
        f'factor: is of network = "lokr", not "{c.network}"',
        "network",
        "factor",
    )
    no(
        c.shard and c.vram is not None,
        "shard: what a part of the base needs is not estimated; leave vram out",
        "shard",
        "vram",
    )
    no(c.shard and not c.train_denoiser, "shard: spreads the denoiser, and needs it to be trained; set train_denoiser = true, "
       "or shard = false", "shard", "train_denoiser")  # fmt: skip
    no(c.restarts > 1 and c.schedule != "cosine", 'restarts: needs schedule = "cosine"', "restarts", "schedule")
    no(bool(c.max_bucket and c.max_bucket < c.min_bucket), f"max_bucket: {c.max_bucket} is below min_bucket, "
       f"{c.min_bucket}", "min_bucket", "max_bucket")  # fmt: skip
    no(c.patience > 0 and c.validation == 0, "patience: counts validations; set validation, the share held out, such as "
       "0.05", "patience", "validation")  # fmt: skip
    no(
        c.warmup >= 1 and c.warmup != int(c.warmup),
        f"warmup: whole steps, or a share below 1, got {c.warmup}",
        "warmup",
    )
    no(c.shift is not None and c.timesteps not in ("auto", "shift"), f'shift: needs timesteps = "shift", not "{c.timesteps}"',
       "shift", "timesteps")  # fmt: skip
    for name in ("shift", "timesteps", "guidance", "min_snr_gamma", "noise_offset"):
        no(out_of_place(name, getattr(c, name), c.kind), f'{name}: {meant_for(c.kind)}, not for objective = "{c.objective}"',
           name, "objective")  # fmt: skip
    for name in sorted({"weight_decay", "betas", "eps", "lr"} & c.optimizer_args.keys()):
        field = {"eps": "epsilon", "lr": "learning_rate"}.get(name, name)
        no(True, f"optimizer_args: {name} has a field of its own, {field}", "optimizer_args")
    listed = () if c.targets in TARGETS else (c.targets,) if isinstance(c.targets, str) else c.targets
    for each in listed:
        no(bool(wrong := not_a_regex(each)), f"targets: {wrong}", "targets")
    if c.vram not in (None, "auto"):
        try:
            memory_bytes(str(c.vram))
        except ConfigError as error:
            no(True, f"vram: {error}", "vram")
    return found


def not_a_regex(pattern: str) -> str:
    """What is wrong with it, and where; empty if nothing is."""
    try:
        re.compile(pattern)
    except re.error as error:  # tells the position
        return f"{shown(pattern)} is no regular expression: {error}"
    except (RecursionError, OverflowError):
        return f"{shown(pattern)} is no regular expression: it is nested too deeply or counts too far"
    return ""


def memory_bytes(text: str) -> int:
    """12GiB, 12G, 800MB: GiB and G are powers of 1024, GB of 1000."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])(i?B)?\s*", text, re.IGNORECASE)
    if found is None or not (number := float(found[1])):
        raise ConfigError(f'{shown(text)} is no amount of memory; write it as "12GiB", or "auto"')
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return int(number * base ** ("KMGT".index(found[2].upper()) + 1))
