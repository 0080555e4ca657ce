"""ai-toolkit's settings, by their place in the first process of its YAML or JSON ("network.linear").

    config.process.0   type: sd_trainer, with a network: a LoRA; without one the whole model is trained
    datasets           each at each of its resolutions: one dataset here per pair
    model.arch         or is_xl, is_v2, is_v3, is_flux: the family

Times of a flow: sigmoid and linear are ours too, and "weighted" is linear with weights of the loss. Its "shift" is
another distribution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.files.paths import is_file
from inweave.training.config import row
from inweave.training.config.aliases import lr_scheduler, precision, save_dtype
from inweave.training.config.optimizer_names import our_optimizer
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import is_off, normalize_name, number_or, parse_bool, parse_int, parse_number
from inweave.training.importers.ai_toolkit.datasets import EDITING, architecture, read_folders
from inweave.training.importers.datasets import put_folders
from inweave.training.importers.defaults import defaults, setting_rows
from inweave.training.importers.files import leaves_of
from inweave.training.importers.models import AI_TOOLKIT as FAMILIES
from inweave.training.importers.models import AI_TOOLKIT_SWITCHES, ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import with_library_defaults
from inweave.training.importers.readers import (
    entries_by_index,
    implied_by,
    min_snr,
    refuse_hidden_dropout,
    substring_patterns,
    vae,
)
from inweave.training.importers.samples import sample_line
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import FLOW, everything, toolkit_targets

_SAMPLE = {
    "width": "width", "height": "height", "seed": "seed", "guidance_scale": "guidance", "sample_steps": "steps",
}  # fmt: skip
_PROMPTS = ("sample.prompts", "sample.samples", "sample.width", "sample.height", "sample.neg", "sample.walk_seed")
_TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
_OTHER_METHODS = {
    "slider": "a slider is trained from prompts", "embedding": "textual inversion trains an embedding",
    "adapter": "an image or control adapter is trained", "decorator": "a decorator is trained",
}  # fmt: skip


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    config = table.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("process"), list):
        return None
    return {name.removeprefix("config.process.0."): value for name, value in leaves_of(table).items()}


def _family(settings: Mapping[str, Any]) -> str:
    """Return the family of a file that trains an adapter; others are refused."""
    kind = str(settings.get("type") or "sd_trainer")
    if kind not in _TRAINERS or normalize_name(settings.get("job", "extension")) not in ("extension", "train"):
        what = kind if kind not in _TRAINERS else settings.get("job")
        raise refuse_method("config.process.0.type", f"{for_message(what)} is not the training of a LoRA")
    for part, method in _OTHER_METHODS.items():
        if any(name.startswith(f"{part}.") for name in settings):
            raise refuse_method(f"config.process.0.{part}", method)
    if not any(name.startswith("network.") for name in settings):
        raise refuse_method("config.process.0.network", "is missing: a full fine-tune trains the whole model")
    arch = settings.get("model.arch")
    if is_off(arch):
        switches = (word for name, word in AI_TOOLKIT_SWITCHES.items() if not is_off(settings.get(f"model.{name}")))
        arch = next(switches, "sd1")
    family = ensure_trainable(FAMILIES.get(normalize_name(str(arch).partition(":")[0])), arch, "model.arch")
    editing = normalize_name(str(arch).partition(":")[0]) in EDITING
    ensure_plain_base(settings.get("model.name_or_path", ""), "model.name_or_path", editing=editing)
    return family


def _prepare(source: Source) -> Translation:
    settings = {name: value for name, value in source.settings.items() if value != ""}
    source.unset.extend(source.settings.keys() - settings.keys())
    family = _family(settings)
    if any(name.startswith("config.process.") for name in settings):
        raise ConfigError("config.process: has several processes; one job is one run")
    values = defaults("ai_toolkit", "values")
    if settings.get("network.rank") is not None:
        values.pop("network.linear")
        if settings.get("network.linear") is not None:
            source.note("network.linear", "network.rank is used")
            settings = {name: value for name, value in settings.items() if name != "network.linear"}
    if settings.get("network.alpha") is not None:
        values["network.linear_alpha"] = settings["network.alpha"]
    if settings.get("train.unet_lr") is not None:
        values.pop("train.lr")
    if family not in FLOW:
        values.pop("train.timestep_type")
    implied = implied_by(settings, values)
    return source.start(family, {**settings, **implied}, implied)


def _translate(out: Translation, source: Source) -> None:
    translate(out, AI_TOOLKIT, skip={name for name in out.settings if name.startswith("datasets.")})
    put_folders(out, read_folders(out))
    if architecture(out) == "fluxkontext":  # a single file has the tensors of FLUX.1 dev
        out.put("model.arch", "variant", "flux1-kontext-dev")
    _put_network(out)
    _put_objective(out)
    _put_optimizer(out)
    rates = [out.get(f"train.{name}") for name in ("lr", "unet_lr", "text_encoder_lr")]
    if out.fields.get("train_text_encoders") and rates[0] is not None and rates[1] is not None and rates[2] is None:
        out.fields["text_encoder_learning_rate"] = parse_number(rates[0])  # that of the UNet is not used
        out.mapping["train.lr"] = "text_encoder_learning_rate"
    refuse_hidden_dropout(out, "network.dropout")
    _divide_micro_steps(out)
    _put_samples(out)


def _put_network(out: Translation) -> None:
    fields, kind, flow = out.fields, out.word("network.type"), out.family in FLOW
    convolutions = out.is_on("network.conv") and kind != "lokr" and not flow
    kinds = {"lora": "locon" if convolutions else "lora", "locon": "locon", "lokr": "lokr", "dora": "dora"}
    fields["network"] = kinds.get(kind, "lora")
    if fields["network"] == "locon":
        conv = parse_int(out.get("network.conv") or out.get("network.linear") or fields.get("rank", 4))
        fields["conv_rank"] = conv
        fields["conv_alpha"] = parse_number(out.get("network.conv_alpha") or conv)
    if kind == "lokr" and out.is_on("network.lokr_full_rank"):
        fields["rank"] = 2**20  # more than any factor has: both stay whole
        fields["alpha"] = float(fields["rank"])
    elif kind != "lokr" and flow and fields.get("alpha") != fields.get("rank"):
        fields["alpha"] = fields.get("rank")
        out.note("network.linear_alpha", "in ai-toolkit adapters of transformers always have alpha = rank")
    if out.family == "flux2" and kind != "lokr":
        why = "ai-toolkit gives the joint projection of q, k, v one adapter; here each has its own"
        out.unsupported("network.type", why)
    if "targets" not in fields:
        whole = is_off(out.get("network.transformer_only", True))
        fields["targets"] = everything() if whole else toolkit_targets(out.family, convolutions)


def _put_objective(out: Translation) -> None:
    flow, scheduler = out.family in FLOW, out.word("train.noise_scheduler")
    fits = flow == (scheduler == "flowmatch") or (flow and scheduler == "ddpm")
    if "train.noise_scheduler" in out.settings and not fits:
        out.refuse("train.noise_scheduler", f"{for_message(out.get('train.noise_scheduler'))} does not fit this model")
    out.fields["objective"] = "flow" if flow else "v_prediction" if out.is_on("model.is_v_pred") else "epsilon"
    if not flow:
        out.fields["timestep_sampling"] = "uniform"
    elif out.fields.get("train_text_encoders"):
        out.refuse("train.train_text_encoder", "the text encoders of this model are not trained")


def _divide_micro_steps(out: Translation) -> None:
    """Divide intervals by gradient_accumulation_steps, the older of two ways, which counts every batch as a step."""
    name = "train.gradient_accumulation_steps"
    count = parse_int(out.get(name) or 1)
    if count <= 1:
        return
    intervals = [each for each in ("steps", "save_every", "sample_every") if out.fields.get(each)]
    uneven = [each for each in intervals if parse_int(out.fields[each]) % count]
    if uneven:
        why = f"ai-toolkit counts batches, and {uneven[0]} = {out.fields[uneven[0]]} is not a multiple of it"
        out.refuse(name, f"{count}: {why}; gradient_accumulation counts steps of the optimizer")
        return
    for each in intervals:
        out.fields[each] = parse_int(out.fields[each]) // count
    out.note(name, f"ai-toolkit counts batches: {', '.join(intervals)} are divided by {count}")


def _put_optimizer(out: Translation) -> None:
    """Set the optimizer: all share one epsilon, and adaptive ones start at a rate of 1."""
    name, kind, fields = out.get("train.optimizer"), out.word("train.optimizer"), out.fields
    plain = {"adam": "adamw", "adam8bit": "adamw8bit", "adam8": "adamw8bit"}.get(kind)
    if plain and not out.is_on("train.optimizer_params.weight_decay"):
        fields |= {"optimizer": plain, "weight_decay": 0.0}  # without decay they are the same
    elif ours := our_optimizer(name):
        fields["optimizer"] = ours
        if kind == "adamw8":  # a class of its own, without decay
            fields.setdefault("weight_decay", 0.0)
    else:
        out.refuse("train.optimizer", f"{for_message(name)} is not supported", "optimizer")
    out.mapping["train.optimizer"] = "optimizer"
    if (kind.startswith(("prodigy", "dadapt"))) and parse_number(fields.get("learning_rate", 1)) < 0.1:
        fields["learning_rate"] = 1.0
        out.note("train.lr", "in ai-toolkit adaptive optimizers start at 1")
    if kind == "adafactor":
        fields.setdefault("optimizer_args", {"scale_parameter": False})
    fields.setdefault("epsilon", defaults("ai_toolkit", "optimizer")["eps"])
    with_library_defaults(out)


def _timesteps(out: Translation, name: str, value: Any) -> None:
    if out.family not in FLOW:
        out.note(name, "only used by flow models")
    else:
        known = {"sigmoid": "sigmoid", "linear": "uniform", "weighted": "uniform"}
        row.choice("timestep_sampling", known).read(out, name, value)
        if normalize_name(value) == "weighted":
            out.put(name, "timestep_weighting", "ai-toolkit")
            out.mapping[name] = "timestep_sampling"


def _filters(out: Translation, name: str, value: Any) -> None:
    patterns = substring_patterns(value)
    if not patterns:
        out.unset.append(name)
    elif name.endswith("only_if_contains"):
        out.put(name, "targets", patterns)
    else:
        out.add_rules(name, [{"pattern": pattern, "skip": True} for pattern in patterns])


def _accumulation(out: Translation, name: str, value: Any) -> None:
    if parse_int(value) > 1:
        out.put(name, "gradient_accumulation", parse_int(value))
    elif parse_int(value) < 0:
        out.refuse(name, f"{for_message(value)}: gradients are accumulated over a number of batches")
    else:
        out.unset.append(name)


def _schedule(out: Translation, name: str, value: Any) -> None:
    if normalize_name(value) in ("linear", "step", "cosinewithrestarts"):
        out.refuse(name, f"{for_message(value)} is another curve in ai-toolkit", "lr_scheduler")
        return
    lr_scheduler.read(out, name, value)
    if normalize_name(value) == "constantwithwarmup":
        out.fields["warmup"] = int(number_or(out.get("train.lr_scheduler_params.num_warmup_steps"), 1000))


def _ema(out: Translation, name: str, value: Any) -> None:
    decay = number_or(out.get("train.ema_config.ema_decay"), 0.999)
    out.put(name, "ema_decay", decay if parse_bool(value) else 0.0)
    for key, plain in (("use_feedback", 0), ("param_multiplier", 1)):
        theirs = f"train.ema_config.{key}"
        if parse_bool(value) and out.is_on(theirs) and out.get(theirs) != plain:
            out.refuse_value(theirs, "the average does not change the weights")


def _put_samples(out: Translation) -> None:
    """Set the prompts with their sizes and negative prompts; with walk_seed each has a seed of its own."""
    common = {ours: out.get(f"sample.{theirs}") for theirs, ours in _SAMPLE.items()}
    listed = out.get("sample.prompts")
    prompts: list[Mapping[str, Any]] = [*entries_by_index(out.settings, "sample.samples", 2).values()]
    prompts = prompts or [{"prompt": each} for each in (listed if isinstance(listed, list) else [listed]) if each]
    lines = []
    for number, sample in enumerate(each for each in prompts if isinstance(each.get("prompt"), str)):
        own = {ours: sample.get(theirs) for theirs, ours in _SAMPLE.items()}
        flags = {name: common[name] if own[name] is None else own[name] for name in ("width", "height")}
        flags |= {name: own[name] for name in ("seed", "guidance", "steps")}
        if flags["seed"] is None and out.is_on("sample.walk_seed"):
            flags["seed"] = parse_int(common["seed"] or 0) + number
        text = sample["prompt"].replace("[trigger]", str(out.fields.get("trigger") or "[trigger]"))
        text = re.sub(r"--ctrl_img(_[1-9])?(?= )", "--ci", text)
        references = [sample.get(name) for name in ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")]
        line = sample_line(out, text, sample.get("neg", out.get("sample.neg")), **flags)
        lines.append(" ".join((line, *(f"--ci {path}" for path in references if path))))
    if lines:
        out.fields["sample_prompts"] = lines
        out.mapping |= dict.fromkeys((n for n in out.settings if n.startswith(_PROMPTS)), "sample_prompts")
    else:
        out.fields["sample_every"] = 0


def _assistant(out: Translation, name: str, value: Any) -> None:
    """Set the assistant; one of the Hub is not downloaded."""
    path = str(value)
    if is_file(path) or path.startswith((".", "/", "~", "\\")) or path[1:2] == ":":
        out.put(name, "assistant", path)
        out.unsupported(name, "samples show the model with it; ai-toolkit's are generated without it")
    else:
        out.refuse(
            name, f"{for_message(value)}: is not downloaded; download it, and set assistant to the file", "assistant"
        )


def _uses_wandb(out: Translation) -> bool:
    return out.is_on("logging.use_wandb")


AI_TOOLKIT: Final[dict[str, SettingRow]] = {
    "network.network_kwargs.only_if_contains": row.custom(_filters),
    "network.network_kwargs.ignore_if_contains": row.custom(_filters),
    "save.dtype": save_dtype, "train.dtype": precision, "train.lr_scheduler": row.custom(_schedule),
    "train.lr": row.to("learning_rate", when=lambda out: not out.get("train.unet_lr"), otherwise="unet_lr is used"),
    "train.text_encoder_lr": row.to("text_encoder_learning_rate",
                                    when=lambda out: out.is_on("train.train_text_encoder"),
                                otherwise="text encoders are not trained"),
    "train.gradient_accumulation_steps": row.custom(_accumulation), "train.timestep_type": row.custom(_timesteps),
    "train.gradient_checkpointing": row.switch("gradient_checkpointing", "full", "off"),
    "logging.use_wandb": row.switch("wandb"),
    "logging.project_name": row.to("wandb_project", when=_uses_wandb, otherwise=row.LOGS),
    "logging.run_name": row.to("wandb_run_name", when=_uses_wandb, otherwise=row.LOGS), "train.min_snr_gamma": min_snr,
    "train.optimizer_params.betas": row.to("betas", lambda value: tuple(parse_number(each) for each in value)),
    "train.ema_config.use_ema": row.custom(_ema), "train.loss_type": row.choice("loss", {"mse": "mse", "mae": "l1"}),
    "train.disable_sampling": row.only("sample_every", 0),
    "sample.sample_every": row.to("sample_every", when=lambda out: not out.is_on("train.disable_sampling"),
                              otherwise="disable_sampling is on"),
    "model.assistant_lora_path": row.custom(_assistant), "model.vae_path": vae,
    "train.cache_text_embeddings": row.only("cache_text"),
    **setting_rows("ai_toolkit"),
}  # fmt: skip

IMPORTER = Importer("ai-toolkit", _recognize, _prepare, _translate)
