"""Validation that reports every problem at once: names, values, and settings that contradict each other.

    fields --pydantic--> types and limits --contradictions--> a configuration, or every problem in one `ConfigError`

If some values are invalid, validation runs once more without them, so that contradictions between the others are
reported in the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from inweave.checked import problem_of
from inweave.errors import ConfigError, InweaveError
from inweave.training.config.dataset_toml import read_tables
from inweave.training.config.fields import TrainSettings
from inweave.training.config.presets import ADAPTIVE, TARGETS
from inweave.training.config.toml import ensure_plain
from inweave.training.config.types import Rule, memory_bytes, regex_problem

ObjectiveKind = Literal["noise", "flow"]
#: settings that have a meaning for one kind of objective only
OBJECTIVE_SETTINGS = (
    "timestep_shift", "timestep_sampling", "guidance", "min_snr_gamma", "noise_offset", "multires_noise_iterations",
    "debiased_estimation", "huber_schedule", "sigma_weighting", "timestep_weighting",
)  # fmt: skip


class Contradictions(ValueError):
    """(settings, message) pairs; raised inside pydantic's validation, which collects ValueErrors only."""

    def __init__(self, pairs: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(message for _, message in pairs))
        self.pairs = pairs


def ensure_consistent(config: TrainSettings) -> None:
    """Raise `Contradictions` if settings contradict each other."""
    c = config
    pairs: list[tuple[tuple[str, ...], str]] = []

    def reject_if(contradiction: bool, settings: str, message: str) -> None:
        if contradiction:
            pairs.append((tuple(settings.split()), message))

    for name in type(c).model_fields:
        pairs += [((name,), problem) for problem in _toml_problems(name, getattr(c, name))]
    reject_if(bool(c.steps and c.epochs), "steps epochs", "steps and epochs: both are set; keep one")
    reject_if(
        c.cache_text and c.train_text_encoders, "cache_text train_text_encoders",
        "cache_text: captions cannot be encoded once while the text encoders are trained; set cache_text = false, or "
        "train_text_encoders = false",
    )  # fmt: skip
    reject_if(
        not (c.train_denoiser or c.train_text_encoders), "train_denoiser train_text_encoders",
        "train_denoiser and train_text_encoders: nothing is left to train; set one of them to true",
    )  # fmt: skip
    reject_if(
        c.network == "lora" and bool(c.conv_rank or c.conv_alpha), "network conv_rank conv_alpha",
        'conv_rank, conv_alpha: network = "lora" has no convolutions; set network = "locon"',
    )  # fmt: skip
    reject_if(
        c.network != "lokr" and c.lokr_factor != -1, "network lokr_factor",
        f'lokr_factor: needs network = "lokr", not "{c.network}"',
    )  # fmt: skip
    reject_if(
        c.network != "lokr" and c.lokr_decompose_both, "network lokr_decompose_both",
        f'lokr_decompose_both: needs network = "lokr", not "{c.network}"',
    )  # fmt: skip
    reject_if(
        c.tucker and c.network in ("lora", "dora"),
        "tucker network",
        f'tucker: needs network = "locon", "loha" or "lokr", not "{c.network}"',
    )
    for name, without in (
        ("hidden_dropout", c.network not in ("lora", "locon")),
        ("rank_dropout", c.network == "dora"),
    ):
        reject_if(
            bool(getattr(c, name)) and without, f"network {name}",
            f'{name}: is between the two factors of lora and locon, and network = "{c.network}" has none there; set '
            f"dropout, which is of the adapter's inputs, or leave it out",
        )  # fmt: skip
    reject_if(
        c.shard and c.vram is not None, "shard vram",
        "shard: the memory of a sharded base model is not estimated; leave vram out",
    )  # fmt: skip
    reject_if(
        c.qat != "off" and c.quantize not in ("off", "keep", c.qat), "qat quantize",
        f'qat: the base is quantize = "{c.quantize}", and the adapter would be merged into a base in "{c.qat}"; use '
        "the same format for both, or leave quantize out",
    )  # fmt: skip
    reject_if(
        bool(c.output_dropout) and c.network in ("loha", "lokr"), "network output_dropout",
        f'output_dropout: is called rank_dropout with network = "{c.network}"; set that',
    )  # fmt: skip
    for name in ("dropout", "hidden_dropout", "rank_dropout", "module_dropout", "output_dropout"):
        reject_if(
            c.qat != "off" and bool(getattr(c, name)), f"qat {name}",
            f"{name}: qat trains the merged weight, and what is dropped cannot be merged; set {name} = 0",
        )  # fmt: skip
    for name, without in (("shard", c.shard), ("train_denoiser", not c.train_denoiser)):
        reject_if(
            c.qat != "off" and without, f"qat {name}",
            f"qat: rounds weights of the denoiser, which {'is in parts' if c.shard else 'is not trained'} with "
            f"{name} = {str(getattr(c, name)).lower()}",
        )  # fmt: skip
    reject_if(
        c.shard and c.offload == "blocks", "shard offload",
        'shard: each process gathers the blocks of the others, from the device; set offload = "off", or shard = false',
    )  # fmt: skip
    reject_if(
        c.offload_activations == "on" and c.gradient_checkpointing == "off" and c.vram is None,
        "offload_activations gradient_checkpointing",
        'offload_activations: without gradient checkpointing, activations are not inputs of blocks alone; set '
        'gradient_checkpointing = "full", or leave it out',
    )  # fmt: skip
    reject_if(
        c.compile == "on" and c.offload == "blocks", "compile offload",
        'compile: blocks that are copied from host memory run eagerly or as CUDA graphs; set compile = "auto", or '
        'offload = "off"',
    )  # fmt: skip
    reject_if(
        c.shard and not c.train_denoiser, "shard train_denoiser",
        "shard: shards the denoiser, which has to be trained; set train_denoiser = true, or shard = false",
    )  # fmt: skip
    reject_if(
        c.cosine_cycles > 1 and c.lr_scheduler != "cosine", "cosine_cycles lr_scheduler",
        'cosine_cycles: needs lr_scheduler = "cosine"',
    )  # fmt: skip
    torch_scheduler = c.lr_scheduler.startswith("torch.")
    reject_if(
        bool(c.lr_scheduler_args) and not torch_scheduler, "lr_scheduler_args lr_scheduler",
        f'lr_scheduler_args: are those of a class of torch.optim.lr_scheduler, not of "{c.lr_scheduler}"',
    )  # fmt: skip
    reject_if(
        bool(c.lr_min_ratio) and torch_scheduler, "lr_min_ratio lr_scheduler",
        f"lr_min_ratio: {c.lr_scheduler} has its own: set eta_min or the like in lr_scheduler_args",
    )  # fmt: skip
    reject_if(
        bool(c.max_bucket and c.max_bucket < c.min_bucket), "min_bucket max_bucket",
        f"max_bucket: {c.max_bucket} is below min_bucket, {c.min_bucket}",
    )  # fmt: skip
    reject_if(
        c.patience > 0 and c.validation_split == 0, "patience validation_split",
        "patience: counts validations; set validation_split, the fraction held out, such as 0.05",
    )  # fmt: skip
    reject_if(
        c.warmup >= 1 and c.warmup != int(c.warmup), "warmup",
        f"warmup: expected a whole number of steps, or a fraction below 1, got {c.warmup}",
    )  # fmt: skip
    reject_if(
        c.text_encoder_stop >= 1 and c.text_encoder_stop != int(c.text_encoder_stop), "text_encoder_stop",
        f"text_encoder_stop: expected a whole number of steps, or a fraction below 1, got {c.text_encoder_stop}",
    )  # fmt: skip
    reject_if(
        c.text_encoder_stop > 0 and not (c.train_text_encoders and c.train_denoiser),
        "text_encoder_stop train_text_encoders train_denoiser",
        "text_encoder_stop: needs train_text_encoders = true, and train_denoiser = true for what is trained after it",
    )  # fmt: skip
    for name in OBJECTIVE_SETTINGS:
        reject_if(
            is_for_other_objective(name, getattr(c, name), c.objective_kind), f"{name} objective",
            f'{name}: {objective_hint(c.objective_kind)}, not for objective = "{c.objective}"',
        )  # fmt: skip
    for name in sorted({"weight_decay", "betas", "eps", "lr"} & c.optimizer_args.keys()):
        own = {"eps": "epsilon", "lr": "learning_rate"}.get(name, name)
        reject_if(True, "optimizer_args", f"optimizer_args: {name} is a setting of its own, {own}")
    for pattern in () if c.targets in TARGETS else (c.targets,) if isinstance(c.targets, str) else c.targets:
        reject_if(bool(problem := regex_problem(pattern)), "targets", f"targets: {problem}")
    for name in ("vram", "ram"):
        if (limit := getattr(c, name)) not in (None, "auto"):
            try:
                memory_bytes(str(limit))
            except ConfigError as error:
                reject_if(True, name, f"{name}: {error}")
    if pairs:
        raise Contradictions(pairs)


def run_problems(config: TrainSettings) -> list[str]:
    """Return reasons to refuse a run whose settings are valid: one would have no effect, or another one."""
    c, problems = config, []
    for name in ("validate_every", "validate_every_epochs"):
        if getattr(c, name) and not c.validation_split:
            problems.append(f"{name}: nothing is held out to validate on; set validation_split, such as 0.05")
    if (c.adaptive_noise_scale or c.noise_offset_random) and not c.noise_offset:
        problems.append("adaptive_noise_scale, noise_offset_random: change a noise_offset, and there is none; set it")
    if c.loraplus_lr_ratio is not None and c.network in ("loha", "lokr"):
        problems.append(f'loraplus_lr_ratio: LoRA+ is for lora, locon and dora, not for network = "{c.network}"')
    if c.loraplus_lr_ratio not in (None, 1.0) and c.optimizer in ADAPTIVE:
        problems.append(
            f'loraplus_lr_ratio: optimizer = "{c.optimizer}" estimates one learning rate for all parameters; '
            "leave it out"
        )
    if c.scale_weight_norms and c.optimizer == "schedulefree":
        problems.append(
            'scale_weight_norms: optimizer = "schedulefree" saves an average of the weights, which is not scaled with '
            "them; leave it out, or choose another optimizer"
        )
    if c.text_encoder_stop and c.optimizer == "schedulefree":
        problems.append(
            'text_encoder_stop: optimizer = "schedulefree" saves an average of the weights, which goes on changing; '
            "leave it out, or choose another optimizer"
        )
    if c.ram is not None and c.vram is None and c.batch_size and c.quantize != "auto":
        problems.append("ram: limits runs that are planned, and this one is not; set vram, or leave ram out")
    if c.min_timestep is not None and c.max_timestep is not None and c.min_timestep >= c.max_timestep:
        problems.append(f"max_timestep: {c.max_timestep} is not above min_timestep, {c.min_timestep}")
    return problems


def is_for_other_objective(name: str, value: Any, kind: ObjectiveKind | None) -> bool:
    """Return whether a value has a meaning for the other kind of objective only."""
    flow_only = {
        "timestep_shift": value is not None,
        "timestep_sampling": value not in ("auto", "uniform"),
        "guidance": value != 1.0,
        "sigma_weighting": value != 0.0,
        "timestep_weighting": value != "none",
    }
    noise_only = {
        "min_snr_gamma": value is not None,
        "noise_offset": value != 0.0,
        "multires_noise_iterations": value != 0,
        "debiased_estimation": value is True,
        "huber_schedule": value == "snr",
    }
    return bool(flow_only.get(name) if kind == "noise" else noise_only.get(name) if kind == "flow" else False)


def objective_hint(kind: ObjectiveKind | None) -> str:
    return "is for flow models" if kind == "noise" else "is for models that predict noise (epsilon, v_prediction)"


def _toml_problems(name: str, value: Any) -> list[str]:
    """Return why a value cannot be written as TOML, or why a table is not a dataset."""
    try:
        ensure_plain(value, name)
    except InweaveError as error:
        return [str(error)]
    tables = value if name == "dataset" and isinstance(value, dict) else None
    return [f"{name}: {problem}" for problem in read_tables(tables)[1]] if tables is not None else []


def validate_into(
    config: TrainSettings, fields: Mapping[str, Any], labels: Mapping[str, str], problems: Iterable[str] = ()
) -> None:
    """Set the fields of a new configuration, or raise every problem.

    ``labels``: our name of a setting -> the name the user wrote; ``problems`` are those known before.
    """
    problems, fields = list(problems), dict(fields)
    invalid: set[str] = set()
    while True:
        try:
            config.__pydantic_validator__.validate_python(fields, self_instance=config)
        except ValidationError as error:
            details = error.errors(include_url=False)
            for each in details:
                problems += _messages(each, labels, invalid)
            failed = {str(each["loc"][0]) for each in details if each["loc"]}
            if not failed:
                break
            invalid |= failed
            fields = {"dataset": "-", **{name: value for name, value in fields.items() if name not in failed}}
            continue
        break
    if problems:
        raise ConfigError(problems)


#: TOML's names for the types that pydantic names
_IN_TOML = {"valid tuple": "list", "valid dictionary or instance of Rule": "table", "valid dictionary": "table"}


def _messages(problem: Any, labels: Mapping[str, str], invalid: set[str]) -> list[str]:
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, Contradictions):
        return [message for settings, message in raised.pairs if not invalid & set(settings)]
    path = [str(part) for part in problem["loc"]]
    label = ".".join(path)
    if path[0] in labels:
        label = f"{labels[path[0]]} ({label})"
    message = str(problem_of(problem, Rule.model_fields if len(path) > 1 else TrainSettings.model_fields, label))
    if problem["type"] == "missing" and len(path) == 1:
        message += f"; {TrainSettings.model_fields[path[0]].description}"
    for pydantic, toml in _IN_TOML.items():
        message = message.replace(pydantic, toml)
    return [message]
