"""SimpleTuner's config.json: the flags of its script, with or without their dashes; or config.env, as variables.

    model_family + model_type = lora   the family, and that an adapter is trained
    lora_type standard                 PEFT: attention, or the modules of flux_lora_target
              lycoris                  lycoris_config, a file next to it: algorithm, sizes and classes of modules
    data_backend_config                a file next to it: a list of folders

Files that it names are read where they are, or next to the configuration. Times of a flow: a sigmoid, shifted by
flow_schedule_shift, or by the resolution with flow_schedule_auto_shift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import cosine_cycles, log_with, lr_scheduler, polynomial_power, precision
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import is_off, normalize_name, number_or, parse_bool, parse_int, parse_number
from inweave.training.importers.defaults import defaults, setting_rows
from inweave.training.importers.models import SIMPLE_TUNER as FAMILIES
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import optimizer, optimizer_args, put_betas, with_library_defaults
from inweave.training.importers.readers import implied_by, min_snr, vae
from inweave.training.importers.samples import parse_size, sample_line
from inweave.training.importers.simpletuner.datasets import put_backends
from inweave.training.importers.simpletuner.lycoris import put_lycoris
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import FLOW

_ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]
_TEXT = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
_TEXT_MLP = ["ff_context.net.0.proj", "ff_context.net.2"]
_MLP = ["ff.net.0.proj", "ff.net.2", *_TEXT_MLP, "proj_mlp", "proj_out"]
_FLUX_TARGETS = {
    "all": [*_ATTENTION, *_TEXT], "mmdit": _ATTENTION, "context": _TEXT, "context+ffs": [*_TEXT, *_TEXT_MLP],
    "all+ffs": [*_ATTENTION, *_TEXT, *_MLP],
    "ai-toolkit": [*_ATTENTION, *_TEXT, *_MLP, "norm.linear", "norm1.linear", "norm1_context.linear"],
    "tiny": ["single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"],
    "nano": ["single_transformer_blocks.7.proj_out"],
}  # fmt: skip
#: adapters that are merged in while a distilled model is trained
_ASSISTANTS = {
    ("z_image", "turbo"): "ostris/zimage_turbo_training_adapter",
    ("z_image", "turbo-ostris-v2"): "ostris/zimage_turbo_training_adapter",
    ("flux", "schnell"): "ostris/FLUX.1-schnell-training-adapter",
}  # fmt: skip
#: flavors of families that read references
EDITING = frozenset({("flux", "kontext"), ("qwen_image", "edit-v2"), ("qwen_image", "edit-v3")})
#: newer names of settings that have a default
_RENAMED = {"checkpointing_steps": "checkpoint_step_interval", "validation_steps": "validation_step_interval"}


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    inside = table.get("config")
    if isinstance(inside, Mapping) and not table.keys() - {"config", "_metadata"}:
        table = inside  # as its web interface keeps a configuration
    names = {name.lstrip("-") for name in table}
    return dict(table) if "model_family" in names or {"model_type", "data_backend_config"} <= names else None


def _prepare(source: Source) -> Translation:
    flags = {name.lstrip("-").replace("-", "_"): value for name, value in source.settings.items()}
    entries = {re.sub(r"^flux_(?=schedule_|use_|beta_)", "flow_", name): value for name, value in flags.items()}
    kind = str(entries.get("model_type") or defaults("simpletuner", "values")["model_type"])
    if kind != "lora":
        raise refuse_method("model_type", f"{for_message(kind)}: a full fine-tune trains the whole model")
    switches = (name for name in ("flux", "sd3", "sdxl") if not is_off(entries.get(name)))
    word = entries.get("model_family") or next(switches, None)
    family = ensure_trainable(FAMILIES.get(normalize_name(word)), word, "model_family")
    for name, method in (("controlnet", "a ControlNet is trained"), ("distillation_method", "a model is distilled")):
        if not is_off(entries.get(name)):
            raise refuse_method(name, method)
    for name in ("pretrained_model_name_or_path", "model_flavour"):
        ensure_plain_base(entries.get(name, ""), name, editing=is_editing(family, entries))
    values = defaults("simpletuner", "values", *(("flow",) if family in FLOW else ()), family)
    for name, alias in _RENAMED.items():
        if entries.get(alias) is not None:
            values.pop(name)
    implied = implied_by(entries, values)
    return source.start(family, {**entries, **implied}, implied)


def is_editing(family: str, entries: Mapping[str, Any]) -> bool:
    """Return whether a model of a family reads references, by its flavor."""
    flavor = str(entries.get("model_flavour") or "").lower()
    return family == "flux2" or (family, flavor) in EDITING


def _put_base(out: Translation) -> None:
    """Set the model of a flavor; one that is trained with an adapter of the Hub merged in needs an `assistant`."""
    known = (
        {} if normalize_name(out.get("model_family")) == "sd2x" else defaults("simpletuner", f"flavors.{out.family}")
    )
    flavor = str(out.get("model_flavour") or next(iter(known), "")).lower()
    if flavor in ("edit-v1", "edit-v2+"):
        why = "Qwen-Image-Edit of August 2025" if flavor == "edit-v1" else "2509 with the times of 2511"
        out.refuse("model_flavour", f"{for_message(flavor)} is {why}, which cannot be trained here", "model")
    if flavor == "kontext":  # a single file has the tensors of FLUX.1 dev
        out.put("model_flavour", "variant", "flux1-kontext-dev")
    if not out.is_on("pretrained_model_name_or_path") and flavor in known:
        out.put("model_flavour", "model", known[flavor])
    elif not out.is_on("pretrained_model_name_or_path"):
        out.refuse("model_flavour", f"{for_message(flavor)}: its model is not known here; set model", "model")
    theirs = out.get("assistant_lora_path") or _ASSISTANTS.get((out.family, flavor))
    if theirs and is_off(out.get("disable_assistant_lora")):
        why = f"SimpleTuner trains this model with {theirs} merged in; download it, and set assistant to the file"
        out.refuse("assistant_lora_path", why, "assistant")


def _translate(out: Translation, source: Source) -> None:
    translate(out, SIMPLE_TUNER)
    for theirs, ours in (("max_train_steps", "steps"), ("num_train_epochs", "epochs")):
        if out.is_on(theirs):
            out.fields[ours] = parse_int(out.get(theirs))
            out.mapping[theirs] = ours
            break
    _put_network(out, source)
    _put_times(out)
    put_backends(out, source, editing=is_editing(out.family, out.settings))
    if out.word("grad_clip_method") == "value":
        out.fields["max_grad_value"] = out.fields.pop("max_grad_norm")
        out.fields["max_grad_norm"] = 0.0
        out.mapping["max_grad_norm"] = "max_grad_value"
    _put_base(out)
    _put_samples(out)
    _put_schedule(out)
    _report_batches(out)
    out.fields["upscale"] = True  # small images are enlarged
    _put_optimizer_defaults(out)


def _put_optimizer_defaults(out: Translation) -> None:
    """Set its own values for each optimizer; its Prodigy is another algorithm, and schedule-free has no schedule."""
    name = str(out.get("optimizer") or "")
    if name == "prodigy":
        out.refuse("optimizer", "'prodigy' is ProdigyPlusScheduleFree, which does not exist here", "optimizer")
    own = defaults("simpletuner", f"optimizers.{name}")
    for theirs, ours in (("betas", "betas"), ("weight_decay", "weight_decay"), ("eps", "epsilon")):
        if theirs in own:
            out.fields.setdefault(ours, tuple(own[theirs]) if theirs == "betas" else own[theirs])
    if out.fields.get("optimizer") == "schedulefree":
        out.fields["lr_scheduler"] = "constant"
        out.refused.pop("lr_scheduler", None)
        out.note("lr_scheduler", "SimpleTuner's schedule-free optimizers have none")
    with_library_defaults(out, out.get("optimizer"))


def _put_network(out: Translation, source: Source) -> None:
    fields = out.fields
    if out.word("lora_type") == "lycoris":
        config = out.get("lycoris_config") or "config/lycoris_config.json"
        table = config if isinstance(config, Mapping) else source.read_file(str(config))
        if isinstance(table, Mapping):
            put_lycoris(out, table)
        else:
            out.refuse("lycoris_config", f"{for_message(config)}: no such file; put it next to the configuration")
        return
    fields["network"] = "dora" if out.is_on("use_dora") else "lora"
    if not out.is_on("lora_alpha"):
        fields["alpha"] = float(parse_int(out.settings["lora_rank"]))
    fields["train_text_encoders"] = False
    if out.family == "flux2":
        fields["targets"] = [*_ATTENTION, "to_qkv_mlp_proj"]
        return
    if out.family != "flux":
        fields["targets"] = [*_ATTENTION, *(_TEXT if out.family == "qwen_image" else ())]
        return
    target = str(out.get("flux_lora_target") or "all")
    if target in _FLUX_TARGETS:
        fields["targets"] = _FLUX_TARGETS[target]
    else:
        out.refuse("flux_lora_target", f"{for_message(target)} is not supported")


def _put_samples(out: Translation) -> None:
    prompt = out.get("validation_prompt")
    if not is_off(out.get("validation_disable")) or not prompt:
        out.fields.pop("sample_every", None)
        return
    size = parse_size(out.get("validation_resolution"))
    negative = "" if out.is_on("validation_disable_unconditional") else out.get("validation_negative_prompt")
    out.fields["sample_prompts"] = [sample_line(out, prompt, negative, **size)]
    out.mapping |= dict.fromkeys(("validation_prompt", "validation_resolution"), "sample_prompts")


def _put_schedule(out: Translation) -> None:
    """Set the schedule: cosine is a wave whose half is lr_warmup_steps long, and polynomial ends at lr_end."""
    kind, fields = out.word("lr_scheduler"), out.fields
    low, rate = parse_number(out.get("lr_end") or 0), parse_number(out.settings["learning_rate"])
    if kind == "constant":
        fields["warmup"] = 0
    elif kind == "polynomial":
        fields["lr_min_ratio"] = min(low / rate, 1.0)
        out.mapping["lr_end"] = "lr_min_ratio"
    elif kind == "cosine":
        steps = parse_int(out.get("lr_warmup_steps") or 0)
        fields |= {"lr_scheduler": "CosineAnnealingLR", "warmup": 0}
        fields["lr_scheduler_args"] = {"T_max": steps or 1000, "eta_min": min(low, rate)}
        why = f"cosine falls and rises again, every {steps or 1000} steps (lr_warmup_steps, or 1000)"
        out.note("lr_scheduler", f"in SimpleTuner {why}")
    elif kind in ("sine", "cosinewithrestarts"):
        curve = "a wave that starts at half of the rate" if kind == "sine" else "a constant rate, by a mistake"
        text = for_message(out.get("lr_scheduler"))
        out.refuse("lr_scheduler", f"{text} is {curve} in SimpleTuner, and has no equivalent", "lr_scheduler")


def _report_batches(out: Translation) -> None:
    if out.family not in FLOW and not out.is_on("disable_segmented_timestep_sampling"):
        if parse_int(out.settings["train_batch_size"]) > 1:
            why = "SimpleTuner spreads the timesteps of a batch evenly; here each is sampled on its own"
            out.unsupported("disable_segmented_timestep_sampling", why)
    strategy = out.word("timestep_bias_strategy")
    if strategy not in ("", "none", "0", "false") and out.family in FLOW:
        out.note("timestep_bias_strategy", "SimpleTuner ignores it for this model")
    elif strategy not in ("", "none", "0", "false"):
        out.refuse_value("timestep_bias_strategy", "timesteps are sampled evenly")


def _put_times(out: Translation) -> None:
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        out.fields.setdefault("objective", "auto")
        return
    out.fields["objective"] = "flow"
    shift = parse_number(out.get("flow_schedule_shift") or 0)
    automatic, beta = out.is_on("flow_schedule_auto_shift"), out.is_on("flow_use_beta_schedule")
    out.fields["logit_std"] = parse_number(out.get("flow_sigmoid_scale") or 1)
    if out.is_on("flow_use_uniform_schedule") or beta:
        if shift in (0, 1) and not automatic and not beta:
            out.fields["timestep_sampling"] = "uniform"
        else:
            out.refuse("flow_use_uniform_schedule", "uniform times with a shift, and beta times, have no equivalent")
    elif automatic and out.family == "flux2":
        why = "SimpleTuner counts a quarter of this model's tokens, which shifts less; set timestep_shift"
        out.refuse("flow_schedule_auto_shift", why, "timestep_shift")
    elif automatic or shift:
        out.fields |= {"timestep_sampling": "shift", "timestep_shift": None if automatic else shift}
    else:
        out.fields["timestep_sampling"] = "sigmoid"


def _loss(out: Translation, name: str, value: Any) -> None:
    ours = {"l2": "mse", "huber": "huber", "smoothl1": "smooth_l1"}.get(normalize_name(value))
    if ours is None:
        out.refuse(name, f"{for_message(value)} is not supported")
        return
    out.put(name, "loss", ours)
    if ours != "mse":
        usual = defaults("simpletuner", "huber")
        out.fields["huber_c"] = parse_number(out.get("huber_c") or usual["huber_c"])
        out.fields["huber_schedule"] = normalize_name(out.get("huber_schedule") or usual["huber_schedule"])


def _scheduler(out: Translation, name: str, value: Any) -> None:
    """Set the schedules that are the same here; `_put_schedule` sets the others."""
    if normalize_name(value) not in ("cosine", "sine", "cosinewithrestarts"):
        lr_scheduler.read(out, name, value)
    else:
        out.mapping[name] = "lr_scheduler"


def _optimizer_config(out: Translation, name: str, value: Any) -> None:
    text = value if not isinstance(value, str) else [each for each in re.split(r"[,\s]+", value) if each]
    optimizer_args(out, name, text)


def _betas(out: Translation, name: str, value: Any) -> None:
    put_betas(out, name, *(out.get(f"optimizer_beta{n}", out.get(f"adam_beta{n}")) for n in (1, 2)))


def _noise_offset(out: Translation, name: str, value: Any) -> None:
    if not out.is_on("offset_noise"):
        out.note(name, "only used with offset_noise")
    else:
        out.refuse(name, f"{for_message(value)}: noise offsets are added to every image, and not by chance")


def _ema(out: Translation, name: str, value: Any) -> None:
    out.put(name, "ema_decay", number_or(out.get("ema_decay"), 0.995) if parse_bool(value) else 0.0)


def _uses_wandb(out: Translation) -> bool:
    return not {"wandb", "all"}.isdisjoint(map(normalize_name, str(out.get("report_to") or "").split(",")))


SIMPLE_TUNER: Final[dict[str, SettingRow]] = {
    "optimizer": row.custom(optimizer), "optimizer_config": row.custom(_optimizer_config),
    "optimizer_beta1": row.custom(_betas), "optimizer_beta2": row.custom(_betas),
    "adam_weight_decay": row.to("weight_decay", parse_number), "lr_scheduler": row.custom(_scheduler),
    "lr_num_cycles": cosine_cycles(), "lr_power": polynomial_power(), "mixed_precision": precision,
    "gradient_checkpointing": row.switch("gradient_checkpointing", "full", "off"), "report_to": row.custom(log_with),
    "tracker_project_name": row.to("wandb_project", when=_uses_wandb, otherwise=row.LOGS),
    "tracker_run_name": row.to("wandb_run_name", when=_uses_wandb, otherwise=row.LOGS),
    "snr_gamma": min_snr, "use_ema": row.custom(_ema), "pretrained_vae_model_name_or_path": vae,
    "prediction_type": row.choice("objective", {
        "epsilon": "epsilon", "vprediction": "v_prediction", "flowmatching": "flow",
    }),
    "loss_type": row.custom(_loss), "noise_offset": row.custom(_noise_offset),
    "lora_init_type": row.choice("network", {"default": "lora", "gaussian": "lora"}),
    "resume_from_checkpoint": row.to("resume", lambda value: "auto" if normalize_name(value) == "latest" else "never"),
    **setting_rows("simpletuner"),
}  # fmt: skip

IMPORTER = Importer("SimpleTuner", _recognize, _prepare, _translate)
