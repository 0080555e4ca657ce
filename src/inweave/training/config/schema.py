"""How to train: one flat, typed configuration, checked before any work starts, all problems at once.

    fields given ──aliases──► our names ──pydantic──► types and limits ──contradictions──► TrainConfig
    what the user did not set ──with_preset(family)──► the family's values

A field remembers whether it was set (`model_fields_set`): presets fill only the others, and `to_toml` writes only those
that were, so that a file read back means what was meant. TOML has no null: "none" empties a field that holds a number.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from inweave.errors import ConfigError
from inweave.training.config.importers.kohya import KOHYA
from inweave.training.config.importers.translate import (
    Translation,
    at_most,
    file_text,
    flat,
    known_names,
    shown,
    to_toml,
    toml_table,
    translate,
)  # fmt: skip
from inweave.training.config.presets import (
    KINDS,
    PRESETS,
    TARGETS,
    Rule,
    contradictions,
    meant_for,
    memory_bytes,
    out_of_place,
)

__all__ = ["PRESETS", "Rule", "TrainConfig", "checked"]

Count = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Side = Annotated[int, Field(ge=8, le=2**16)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(BaseModel):
    """One training run. Fields left out take the family's preset (`with_preset`), then the defaults here."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    _said: frozenset[str] | None = PrivateAttr(None)

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
        if isinstance(value, str) and value.strip().lower() == "none" and name in _EMPTIED_BY_NONE:
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

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TrainConfig:
        if found := contradictions(self):
            raise _Contradictions(found)
        return self

    @classmethod
    def of(cls, **fields: Any) -> TrainConfig:
        """Checked, under our names or kohya's: everything that is wrong comes back in one `ConfigError`."""
        said = _ours(fields)
        return _noted(checked(said), said.notes)

    @classmethod
    def load(cls, path: str | Path, **over: Any) -> TrainConfig:
        """From a TOML file; its sections, if any, only group. What is given besides goes before what it says.

        Problems name the file, and the line where it is known.
        """
        text = file_text(path)
        fields, problems = flat(toml_table(text, str(path)), keep=("parts", "optimizer_args"))
        said, more = _ours(fields), _ours(over)
        replaced = {*more.fields, *(("steps", "epochs") if {"steps", "epochs"} & more.fields.keys() else ())}
        told = [problem for problem in more.problems if problem not in said.problems]
        said.fields = {**{name: value for name, value in said.fields.items() if name not in replaced}, **more.fields}
        said.taken = {**{name: ours for name, ours in said.taken.items() if ours not in replaced}, **more.taken}
        for name in ("problems", "unknown", "no_equivalent", "notes"):
            getattr(said, name).extend(getattr(more, name))
        try:
            config = checked(said)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError([
                problem if problem in told else f"{path}{_line_of(problem, text)}: {problem}" for problem in at_most(problems)
            ])  # fmt: skip
        return _noted(config, said.notes)

    def to_toml(self, *, everything: bool = False, without: Collection[str] = ()) -> str:
        """What was set (or ``everything``), as `load` reads it."""
        lines: list[str] = []
        for name in (each for each in type(self).model_fields if each not in without):
            value = getattr(self, name)
            if value is None and name in _EMPTIED_BY_NONE:
                value = "none"
            if value is not None and (everything or name in self.model_fields_set):
                plain = [rule.model_dump(exclude_defaults=True) for rule in value] if name == "rules" else value
                lines.append(f"{name} = {to_toml(plain)}")
        return "\n".join([*lines, ""])

    def with_preset(self, family: str) -> TrainConfig:
        """Fields the user did not set, from the family's preset; what the family cannot do is an error."""
        if family not in PRESETS:
            raise ConfigError(f"there is no preset for {shown(family)}; known are {', '.join(PRESETS)}")
        length = {"steps", "epochs"} if self.steps or self.epochs else set()
        said = {name: getattr(self, name) for name in self.model_fields_set - ({"steps", "epochs"} - length)}
        given = {name: value for name, value in PRESETS[family].items() if name not in length}
        if self.objective != "auto":  # an objective that was asked for outweighs what suits the usual one
            given = {name: value for name, value in given.items() if not out_of_place(name, value, self.kind)}
        if self.timesteps not in ("auto", "shift"):  # another way to draw them takes no shift
            given.pop("shift", None)
        if self.optimizer == "prodigy":  # it finds every rate itself
            given["learning_rate"] = 1.0
            given.pop("text_encoder_learning_rate", None)
        if (side := said.get("resolution") or given.get("resolution") or 512) < 512:
            given["min_bucket"] = max(8, side // 2)  # the usual one leaves small pictures no bucket
        filled = checked(Translation(fields={**given, **said}))
        kind = self.kind or KINDS.get(family)
        if wrong := [
            f"{name}: {meant_for(kind)}, and {family} is not" for name in said if out_of_place(name, said[name], kind)
        ]:
            raise ConfigError(wrong)
        filled._said = self.said
        return filled

    @property
    def said(self) -> frozenset[str]:
        """What the user set, whatever a preset has filled in since."""
        return self._said if self._said is not None else frozenset(self.model_fields_set)

    @property
    def kind(self) -> Literal["noise", "flow"] | None:
        """What the objective is about; None where the model's own is used."""
        return {"auto": None, "flow": "flow"}.get(self.objective, "noise")

    @property
    def vram_bytes(self) -> int | None:
        """The memory to stay within; None without a limit, or where what is free decides."""
        return None if self.vram in (None, "auto") else memory_bytes(str(self.vram))

    def warmup_steps(self, steps: int) -> int:
        """Of a run of so many steps; a preset's may be longer than a short run, and then takes half of it."""
        found = round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        return found if "warmup" in self.said else min(found, steps // 2)


_OWN = frozenset(TrainConfig.model_fields)


def _ours(fields: Mapping[str, Any]) -> Translation:
    return translate({name.lstrip("-").replace("-", "_"): value for name, value in fields.items()}, KOHYA, _OWN)


def _noted(config: TrainConfig, notes: Iterable[str]) -> TrainConfig:
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return config


def _plain(value: Any) -> bool:
    return isinstance(value, bool | str) or (isinstance(value, int | float) and abs(value) < 2**63)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    joined = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if joined else (annotation,)


#: fields that may be empty and hold no text: there "none" cannot mean anything else
_EMPTIED_BY_NONE = frozenset(
    name
    for name, field in TrainConfig.model_fields.items()
    if type(None) in _kinds(field.annotation) and str not in _kinds(field.annotation)
)


class _Contradictions(ValueError):
    def __init__(self, found: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(told for _, told in found))
        self.found = found


#: what TOML calls the kinds pydantic names
_IN_TOML = {"valid tuple": "list", "valid dictionary or instance of Rule": "table", "valid dictionary": "table"}


def checked(said: Translation) -> TrainConfig:
    """The configuration, or all that is wrong with it: names, values, and values that contradict each other."""
    problems = list(said.problems) + [
        f"{name}: there is no such setting{_near(name)}" for name in map(_short, said.unknown[:50])
    ]
    problems += [f"{told} (no equivalent here)" for told in said.no_equivalent]
    fields = dict(said.fields)
    bad: set[str] = set()
    while True:
        try:
            config = TrainConfig.model_validate(fields)
        except ValidationError as error:
            failed = {str(each["loc"][0]) for each in error.errors(include_url=False) if each["loc"]}
            for each in error.errors():
                problems += _told(each, said, bad)
            if not failed:
                break
            # once more without them, so that what the others contradict is told in the same breath
            bad |= failed
            fields = {"dataset": "-", **{name: value for name, value in fields.items() if name not in failed}}
            continue
        if not problems:
            return config
        break
    raise ConfigError(problems)


def _told(problem: Any, said: Translation, bad: set[str]) -> Iterable[str]:
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, _Contradictions):
        return [told for fields, told in raised.found if not bad & set(fields)]
    path = [str(part) for part in problem["loc"]]
    label = ".".join(path)
    if theirs := [name for name, ours in said.taken.items() if ours == path[0] != name]:
        label = f"{theirs[0]} ({label})"
    if problem["type"] == "extra_forbidden":
        return [f"{label}: there is no such setting{_near(path[-1], Rule.model_fields)}"]
    if problem["type"] == "missing":
        return [
            f"{label}: is needed" + (f"; {TrainConfig.model_fields['dataset'].description}" if path[1:] == [] else "")
        ]
    told = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ").strip()
    for pydantic, plain in _IN_TOML.items():
        told = told.replace(pydantic, plain)
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
        told += f", got {shown(problem['input'])}{_near(problem['input'], choices)}"
    return [f"{label}: {told}" if "got" in told else f"{label}: {told}, got {shown(problem['input'])}"]


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."


def _near(name: str, known: Iterable[str] = ()) -> str:
    names = list(known) or [*TrainConfig.model_fields, *known_names(KOHYA)]
    near = difflib.get_close_matches(name[:100], names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _line_of(problem: str, text: str) -> str:
    """`:12` where the field a problem begins with stands in the file."""
    name = re.match(r"[A-Za-z_]\w*", problem)
    found = name and re.search(rf"^[ \t]*[\"']?{name[0]}[\"']?[ \t]*=", text, re.MULTILINE)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""
