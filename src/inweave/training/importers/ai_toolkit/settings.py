"""ai-toolkit's settings, by their place in the first process of its YAML or JSON ("network.linear").

    config.process.0   type: sd_trainer, with a network: a LoRA; without one the whole model is trained
    datasets           each at each of its resolutions: one dataset here per pair
    model.arch         or is_xl, is_v2, is_v3, is_flux: the family

Times of a flow: sigmoid and linear are ours too. Its "shift" and "weighted" are other distributions and loss weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.config import row
from inweave.training.config.aliases import lr_scheduler, precision, save_dtype
from inweave.training.config.optimizer_names import our_optimizer
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import is_off, normalize_name, parse_bool, parse_int, parse_number
from inweave.training.importers.ai_toolkit.datasets import read_folders
from inweave.training.importers.datasets import put_folders
from inweave.training.importers.defaults import defaults
from inweave.training.importers.files import leaves_of
from inweave.training.importers.models import AI_TOOLKIT as FAMILIES
from inweave.training.importers.models import AI_TOOLKIT_SWITCHES, ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.optimizers import with_library_defaults
from inweave.training.importers.readers import implied_by, min_snr, refuse_hidden_dropout, substring_patterns, vae
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import FLOW, everything, toolkit_targets

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
    ensure_plain_base(settings.get("model.name_or_path", ""), "model.name_or_path")
    return family


def _prepare(source: Source) -> Translation:
    settings = source.settings
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
    _put_network(out)
    _put_objective(out)
    _put_optimizer(out)
    rates = [out.get(f"train.{name}") for name in ("lr", "unet_lr", "text_encoder_lr")]
    if out.fields.get("train_text_encoders") and rates[0] is not None and rates[1] is not None and rates[2] is None:
        out.fields["text_encoder_learning_rate"] = parse_number(rates[0])  # that of the UNet is not used
        out.mapping["train.lr"] = "text_encoder_learning_rate"
    refuse_hidden_dropout(out, "network.dropout")
    _divide_micro_steps(out)
    if trigger := out.fields.get("trigger"):
        prompts = out.fields.get("sample_prompts", [])
        out.fields["sample_prompts"] = [each.replace("[trigger]", trigger) for each in prompts]
    if not out.fields.get("sample_prompts"):
        out.fields["sample_every"] = 0


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
    elif kind != "lokr" and flow and fields.get("alpha") != fields["rank"]:
        fields["alpha"] = float(fields["rank"])
        out.note("network.linear_alpha", "in ai-toolkit adapters of transformers always have alpha = rank")
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
        row.choice("timestep_sampling", {"sigmoid": "sigmoid", "linear": "uniform"}).read(out, name, value)


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
        out.fields["warmup"] = parse_int(out.get("train.lr_scheduler_params.num_warmup_steps") or 1000)


def _range_of_steps(*neutral: int) -> SettingRow:
    def read(out: Translation, name: str, value: Any) -> None:
        if parse_int(value) in neutral:
            out.unset.append(name)
        else:
            why = "places in a schedule, of which 0 is pure noise, are not chosen here"
            out.refuse(name, f"{for_message(value)}: {why}")

    return row.custom(read)


def _ema(out: Translation, name: str, value: Any) -> None:
    decay = parse_number(out.get("train.ema_config.ema_decay") or 0.999)
    out.put(name, "ema_decay", decay if parse_bool(value) else 0.0)
    for key, plain in (("use_feedback", 0), ("param_multiplier", 1)):
        theirs = f"train.ema_config.{key}"
        if parse_bool(value) and out.is_on(theirs) and out.get(theirs) != plain:
            out.refuse_value(theirs, "the average does not change the weights")


def _sample_prompt(out: Translation, name: str, value: Any) -> None:
    if name.endswith(".prompt") and isinstance(value, str):
        out.fields["sample_prompts"] = [*out.fields.get("sample_prompts", []), value]
        out.mapping[name] = "sample_prompts"
    else:
        out.note(name, row.SAMPLES)


def _uses_wandb(out: Translation) -> bool:
    return out.is_on("logging.use_wandb")


_SCHEDULE = "timesteps and noise are sampled from the model's whole schedule"
_PREDICTION = "the loss is that of the model's own prediction"
AI_TOOLKIT: Final[dict[str, SettingRow]] = {
    **row.renamed({
        "config.name": "name", "training_folder": "output", "device": "device", "trigger_word": "trigger",
        "network.linear": "rank", "network.rank": "rank", "network.linear_alpha": "alpha",
        "network.dropout": "hidden_dropout", "network.lokr_factor": "lokr_factor", "save.save_every": "save_every",
        "save.max_step_saves_to_keep": "keep_last", "train.batch_size": "batch_size", "train.steps": "steps",
        "train.gradient_accumulation": "gradient_accumulation", "train.unet_lr": "learning_rate",
        "train.train_unet": "train_denoiser", "train.train_text_encoder": "train_text_encoders",
        "train.noise_offset": "noise_offset", "train.max_grad_norm": "max_grad_norm",
        "train.optimizer_params.weight_decay": "weight_decay", "train.optimizer_params.eps": "epsilon",
        "train.reg_weight": "prior_loss_weight", "train.seed": "seed", "model.name_or_path": "model",
        "sample.prompts": "sample_prompts", "sample.seed": "sample_seed", "sample.sample_steps": "sample_steps",
        "sample.guidance_scale": "sample_guidance", "logging.log_every": "log_every",
    }),
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
    "sample.samples.*": row.custom(_sample_prompt), "train.min_denoising_steps": _range_of_steps(0),
    "train.max_denoising_steps": _range_of_steps(999, 1000), "model.vae_path": vae,
    "train.cache_text_embeddings": row.only("cache_text"),
    **row.each(row.ignored(row.NO_EFFECT), """
        job meta.* type performance_log_every sqlite_db_path save.save_format log_dir config.training_folder
        config.device config.is_* config.base_model ui_*"""),
    **row.each(row.ignored(row.OWN_FILE), """
        model.is_* model.arch model.model_kwargs* model.dtype model.*_dtype sample.sampler train.noise_scheduler
        model.use_flux_cfg model.latent_space* model.experimental_xl"""),
    **row.each(row.ignored(row.SAMPLES), """
        sample.* train.skip_first_sample train.force_first_sample train.free_u train.show_turbo_outputs"""),
    **row.each(row.ignored(row.ELSEWHERE), """
        train.ema_config.* network.transformer_only train.unload_text_encoder network.type network.lokr_full_rank
        model.qtype* network.conv network.conv_alpha network.alpha train.optimizer
        train.lr_scheduler_params.num_warmup_steps train.content_or_style_reg train.lr_scheduler_params.total_iters
        train.refiner_lr train.embedding_lr train.adapter_lr train.inverted_mask_prior_multiplier
        train.diff_output_preservation_* train.start_step train.blank_prompt_preservation_* train.train_refiner
        train.next_sample_timesteps network.old_lokr_format train.target_norm_std_value train.cfg_* train.max_cfg_scale
        train.max_negative_prompts train.guidance_loss_target network.split_multistage_loras
        train.paramiter_swapping_factor train.correct_pred_norm_multiplier train.num_train_timesteps
        train.*_feature_*_weight train.*_feature_loss_weight"""),
    **row.each(row.ignored(row.SPEED), """
        train.xformers train.sdp train.attention_backend model.compile* train.skip_* model.*_device
        model.text_encoder_bits model.split_model* train.single_item_batching"""),
    "logging.*": row.ignored(row.LOGS),
    "train.content_or_style": row.refused(_SCHEDULE, "balanced"),
    **row.each(row.refused(_SCHEDULE), """
        train.linear_timesteps* train.snr_gamma train.weight_jitter train.learnable_snr_gos"""),
    **row.each(row.refused(_SCHEDULE, 1.0), "train.noise_multiplier train.*noise* train.*multiplier"),
    "train.loss_target": row.refused(_PREDICTION, "noise"), "train.pred_scaler": row.refused(_PREDICTION, 1.0),
    **row.each(row.refused(_PREDICTION), """
        train.diff_output_preservation train.blank_prompt_preservation train.inverted_mask_prior train.do_*
        train.target_norm_std train.*_path train.correct_pred_norm train.match_adapter* train.train_turbo"""),
    "train.lr_scheduler_params.*": row.refused("is not supported", 0),
    "train.switch_boundary_every": row.refused("is not supported", 1),
    "train.adapter_assist*": row.refused("is not supported", "t2i"),
    **row.each(row.refused("is not supported"), """
        train.optimizer_params.* train.prompt_* train.short_and_long* train.negative_prompt
        train.bypass_guidance_embedding train.adaptive_scaling_factor train.standardize_* train.merge_network_on_save
        train.unconditional_prompt network.network_kwargs.* network.lorm*"""),
    **row.each(row.refused("the base model is used unchanged"), """
        model.assistant_lora_path model.lora_path model.inference_lora_path model.refiner_name_or_path
        model.attn_masking model.only_if_contains model.ignore_if_contains"""),
    **row.each(row.different(row.MEMORY), """
        model.quantize* model.low_vram model.layer_offloading* model.accuracy_recovery_adapter model.auto_memory"""),
    "save.push_to_hub": row.different(row.UPLOAD), "save.hf_*": row.different(row.UPLOAD, True),
    **row.each(row.different("set parts"), "model.extras_name_or_path model.te_name_or_path model.unet_path"),
}  # fmt: skip

IMPORTER = Importer("ai-toolkit", _recognize, _prepare, _translate)
