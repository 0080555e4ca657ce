"""Every setting of a training run: its type, its limits, its default and its description.

One flat table. What contradicts what is in `validation`, what a family prefers in `presets`, and how a table is read
and written in `schema`.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from inweave.errors import ConfigError
from inweave.training.config.presets import TARGETS
from inweave.training.config.toml import for_message

Count = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Side = Annotated[int, Field(ge=8, le=2**16)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(ge=0, lt=1)]


def regex_problem(pattern: str) -> str:
    """What is wrong with it, and where; empty if nothing is."""
    try:
        re.compile(pattern)
    except re.error as error:  # tells the position
        return f"{for_message(pattern)} is no regular expression: {error}"
    except (RecursionError, OverflowError):
        return f"{for_message(pattern)} is no regular expression: it is nested too deeply or counts too far"
    return ""


def memory_bytes(text: str) -> int:
    """12GiB, 12G, 800MB: GiB and G are powers of 1024, GB of 1000."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])(i?B)?\s*", text, re.IGNORECASE)
    if found is None or not (number := float(found[1])):
        raise ConfigError(f'{for_message(text)} is no amount of memory; write it as "12GiB", or "auto"')
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return int(number * base ** ("KMGT".index(found[2].upper()) + 1))


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
        if wrong := regex_problem(value):
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


class Settings(BaseModel):
    """The fields of `TrainConfig`, each checked on its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str = Field("inweave/emoji", description="a file, a folder, a known name or an id of the model to adapt")
    variant: str | None = Field(None, description="which variant it is, where its file does not tell")
    parts: dict[str, str] = Field({}, description="parts to take from elsewhere, such as vae = a file")
    device: str | None = Field(None, description="cuda, cuda:1, cpu; the best there is unless told")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="of the work; masters are fp32")

    dataset: str = Field(
        min_length=1, description="a folder, a kohya dataset .toml, a .txt/.jsonl of texts, or inweave/pixel"
    )
    output: str = Field("out", description="the folder for adapters, checkpoints and samples")
    name: str = Field("lora", min_length=1, description="the adapter's file name, without its ending")
    trigger: str | None = Field(None, description="a word put before every caption that lacks it")

    network: Literal["lora", "locon", "dora", "loha", "lokr"] = Field("lora", description="the kind of adapter")
    rank: Count = Field(16, description="its size")
    alpha: Positive | None = Field(None, description="its scale is alpha / rank; none: alpha is the rank")
    stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rs-LoRA)")
    conv_rank: Count | None = Field(None, description="rank of convolutions; none: as rank, if they are trained")
    conv_alpha: Positive | None = Field(None, description="alpha of convolutions; none: their rank")
    dropout: Part = Field(0.0, description="share of the adapter's inputs dropped")
    factor: Annotated[int, Field(ge=-1, lt=2**31)] = Field(-1, description="of LoKr; -1: the most even split")
    targets: str | tuple[str, ...] = Field("attention", description="attention, attention-mlp, all; names or regexes")
    rules: tuple[Rule, ...] = Field((), description="rank, alpha, learning rate or skip by pattern")
    train_denoiser: bool = Field(True, description="adapt the UNet or transformer")
    train_text_encoders: bool = Field(False, description="adapt the text encoders too")
    start_from: str | None = Field(None, description="an adapter, of any dialect, to go on from")

    steps: Count | None = Field(None, description="updates of the weights; or say epochs")
    epochs: Count | None = Field(None, description="passes over the dataset; or say steps")
    batch_size: Count = Field(1, description="examples at once")
    accumulation: Count = Field(1, description="batches an update is made of")
    learning_rate: Positive = Field(1e-4, description="of the denoiser; with prodigy, 1")
    text_encoder_learning_rate: Positive | None = Field(None, description="none: as learning_rate")
    optimizer: Literal["adamw", "adamw8bit", "prodigy", "schedulefree", "adafactor"] = Field(
        "adamw", description="adamw8bit keeps its state in 8 bits; prodigy finds its own rate"
    )
    optimizer_args: dict[str, Any] = Field({}, description="what else the optimizer takes")
    weight_decay: NotNegative = Field(0.01, description="decoupled")
    betas: tuple[Part, Part] = Field((0.9, 0.999), description="how long the optimizer remembers")
    epsilon: Positive = Field(1e-8, description="keeps the optimizer from dividing by zero")
    schedule: Literal["constant", "cosine", "linear", "polynomial"] = Field("constant", description="after the warm-up")
    warmup: NotNegative = Field(0, description="steps the rate rises over; below 1: a share of all steps")
    restarts: Count = Field(1, description="cosines in a row")
    power: Positive = Field(1.0, description="of the polynomial schedule")
    max_grad_norm: NotNegative = Field(1.0, description="longer gradients are shortened to it; 0: never")
    ema: Part = Field(0.0, description="decay of the averaged weights; 0: none are kept")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="same seed, same machine, same adapter")

    resolution: Annotated[int, Field(ge=16, le=8192)] | None = Field(None, description="none: the model's own")
    buckets: bool = Field(True, description="keep the shape of pictures, grouped by size")
    bucket_step: Side = Field(64, description="sizes of buckets are multiples of it")
    min_bucket: Side = Field(256, description="shortest side of a bucket")
    max_bucket: Side | None = Field(None, description="longest side; none: twice the resolution")
    upscale: bool = Field(False, description="enlarge pictures that are smaller than their bucket")
    flip: bool = Field(False, description="mirror half of the pictures, drawn anew each time")
    crop: Literal["center", "random"] = Field("center", description="where to cut what does not fit")

    caption_extensions: tuple[str, ...] = Field((".txt", ".caption"), description="of files beside pictures, in order")
    caption: str | None = Field(None, description="one caption for all")
    caption_dropout: Share = Field(0.0, description="share of captions left empty, which keeps guidance working")
    shuffle_tags: bool = Field(False, description="tags in another order each time")
    keep_tokens: Number = Field(0, description="tags that stay in front")
    tag_separator: str = Field(",", min_length=1, description="between tags")
    tag_dropout: Share = Field(0.0, description="share of tags left out")
    caption_variants: Count = Field(4, description="shuffled forms of a caption that are cached")

    objective: Literal["auto", "epsilon", "v_prediction", "flow"] = Field("auto", description="auto: the model's own")
    min_snr_gamma: Positive | None = Field(None, description="evens out the steps; 5 is usual; not for flows")
    noise_offset: NotNegative = Field(0.0, description="shifts whole channels, for darker darks; not for flows")
    timesteps: Literal["auto", "uniform", "logit_normal", "sigmoid", "shift"] = Field(
        "auto", description="how they are drawn; shift: logit-normal, moved by `shift` or by resolution (flows)"
    )
    shift: Positive | None = Field(None, description="moves the timesteps of a flow towards noise; 1: not")
    logit_mean: float = Field(0.0, description="of logit-normal timesteps")
    logit_std: Positive = Field(1.0, description="of logit-normal timesteps")
    masked_loss: bool = Field(False, description="learn only where the masks are white")
    prior_weight: NotNegative = Field(1.0, description="of regularisation pictures")
    guidance: NotNegative = Field(1.0, description="what Flux dev's guidance input gets in training")
    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = Field(None, description="2: CLIP's layer before the last")

    checkpointing: Literal["off", "selective", "full"] = Field("off", description="compute again instead of keeping")
    shard: bool = Field(False, description="spread the frozen base over all processes (--gpus 2 or more)")
    cache_latents: bool = Field(True, description="encode pictures once")
    cache_text: bool = Field(True, description="encode captions once; off while text encoders are trained")
    cache_dir: str | None = Field(None, description="where encoded things are kept; none: ~/.cache/inweave/train")
    vram: str | None = Field(None, description='memory to stay within: "12GiB", or "auto" for what is free')

    save_every: Number = Field(0, description="steps between checkpoints; 0: at the end only")
    keep_last: Number = Field(3, description="checkpoints kept; 0: all")
    save_dtype: Literal["fp16", "bf16", "fp32"] = Field("fp16", description="of the adapter's tensors")
    dialect: Literal["kohya", "diffusers", "peft"] = Field(
        "kohya", description="whose names the adapter's tensors have"
    )
    resume: str = Field("never", min_length=1, description="auto: the last checkpoint in output; never; or a path")

    sample_every: Number = Field(0, description="steps between samples; 0: none")
    sample_prompts: tuple[str, ...] = Field((), description="what to sample, with kohya's flags; or a .txt of them")
    sample_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(42, description="the same for every sample")
    sample_steps: Count | None = Field(None, description="none: the model's own")
    sample_guidance: NotNegative | None = Field(None, description="none: the model's own")

    validation: Part = Field(0.0, description="share of the dataset held out")
    patience: Number = Field(0, description="validations without progress before stopping; 0: never stop early")
    max_bad_steps: Count = Field(20, description="steps without a finite loss, in a row, before giving up")
    tensorboard: bool = Field(False, description="write TensorBoard's files into output")
    skip_bad: bool = Field(False, description="leave out pictures that cannot be read, instead of stopping")
    log_every: Count = Field(10, description="steps between lines of the log")

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if isinstance(value, bool) and cls.model_fields[name].annotation is not bool:
            raise ValueError(f"true or false says nothing here, got {value}")
        if isinstance(value, str) and value.strip().lower() == "none" and name in EMPTIED_BY_NONE:
            return None
        if name in ("sample_prompts", "caption_extensions") and isinstance(value, str):
            value = [value] if value else []
        if name == "caption_extensions" and isinstance(value, list | tuple):
            return tuple(f".{each}" if isinstance(each, str) and each[:1] != "." else each for each in value)
        if (
            name == "name"
            and isinstance(value, str)
            and (value in (".", "..") or any(sign in "/\\" or not sign.isprintable() for sign in value))
        ):
            raise ValueError("a file name without folders is needed")
        if name == "optimizer_args" and isinstance(value, dict) and not all(map(_plain, value.values())):
            raise ValueError("its values are true or false, finite numbers or text")
        if name == "targets" and not isinstance(value, str):
            if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
                raise ValueError(f"one of {', '.join(TARGETS)}, a name, or a list of names and regexes is needed")
            return tuple(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _text_that_changes_is_not_cached(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("train_text_encoders") is True and "cache_text" not in data:
            return {**data, "cache_text": False}
        return data

    @property
    def kind(self) -> Literal["noise", "flow"] | None:
        """What the objective is about; None where the model's own is used."""
        return {"auto": None, "flow": "flow"}.get(self.objective, "noise")


def _plain(value: Any) -> bool:
    return isinstance(value, bool | str) or (isinstance(value, int | float) and abs(value) < 2**63)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    joined = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if joined else (annotation,)


#: fields that may be empty and hold no text: there "none" cannot mean anything else
EMPTIED_BY_NONE = frozenset(
    name
    for name, field in Settings.model_fields.items()
    if type(None) in _kinds(field.annotation) and str not in _kinds(field.annotation)
)
