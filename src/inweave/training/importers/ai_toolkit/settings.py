"""ai-toolkit's settings, by their place in the first process of its YAML or JSON ("network.linear").

    config.process.0   type: sd_trainer, with a network: a LoRA; without one the whole model is trained
    datasets           each at each of its resolutions; one of ours per pair
    model.arch         or is_xl, is_v2, is_v3, is_flux: the family

Times of a flow: sigmoid and linear are ours too. Its "shift" and "weighted" are other distributions and loss weights.
"""

from __future__ import annotations

from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.training.importers.ai_toolkit.datasets import read_folders
from inweave.training.importers.datasets import put_folders
from inweave.training.importers.defaults import defaults
from inweave.training.importers.models import (
    AI_TOOLKIT as FAMILIES,
)
from inweave.training.importers.models import (
    AI_TOOLKIT_SWITCHES,
    ensure_plain_base,
    ensure_trainable,
    refuse_method,
)
from inweave.training.importers.optimizers import lr_scheduler, our_optimizer, with_library_defaults
from inweave.training.importers.targets import FLOW, everything, toolkit_targets
from inweave.training.importers.translate import (
    ELSEWHERE,
    LOGS,
    MEMORY,
    OWN_FILE,
    SPEED,
    UPLOAD,
    OtherSettings,
    SettingsDialect,
    Translation,
    choice,
    min_snr,
    precision,
    refuse_hidden_dropout,
    sample_prompt,
    save_dtype,
    substring_patterns,
    switch,
    translate,
    used_if,
)
from inweave.training.importers.values import is_off, normalize_name, parse_bool, parse_int, parse_number

_TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")


def toolkit_family(settings: OtherSettings) -> str:
    """The family of a file that trains an adapter; others are refused."""
    kind = str(settings.get("type") or "sd_trainer")
    if kind not in _TRAINERS or normalize_name(settings.get("job", "extension")) not in ("extension", "train"):
        what = kind if kind not in _TRAINERS else settings.get("job")
        raise refuse_method("config.process.0.type", f"{for_message(what)} is not the training of a LoRA")
    for part, method in (("slider", "a slider is trained from prompts"), ("embedding", "textual inversion trains an embedding"),
                         ("adapter", "an image or control adapter is trained"), ("decorator", "a decorator is trained")):  # fmt: skip
        if any(name.startswith(f"{part}.") for name in settings):
            raise refuse_method(f"config.process.0.{part}", method)
    if not any(name.startswith("network.") for name in settings):
        raise refuse_method("config.process.0.network", "is missing: a full fine-tune trains the whole model")
    arch = settings.get("model.arch")
    if is_off(arch):
        arch = next(
            (word for name, word in AI_TOOLKIT_SWITCHES.items() if not is_off(settings.get(f"model.{name}"))), "sd1"
        )
    family = FAMILIES.get(normalize_name(str(arch).partition(":")[0]))
    ensure_trainable(family, arch, "model.arch")
    ensure_plain_base(settings.get("model.name_or_path", ""), "model.name_or_path")
    return str(family)


def import_toolkit(settings: OtherSettings, out: Translation) -> dict[str, Any]:
    """Translate into ``out``; returns the defaults that were used."""
    out.family = toolkit_family(settings)
    if any(name.startswith("config.process.") for name in settings):
        raise ConfigError("config.process: has several processes; one job is one run")
    values = defaults("ai_toolkit", "values")
    if settings.get("network.rank") is not None:
        values.pop("network.linear")
        if settings.get("network.linear") is not None:
            out.note("network.linear", "network.rank is used")
            settings = {name: value for name, value in settings.items() if name != "network.linear"}
    if settings.get("network.alpha") is not None:
        values["network.linear_alpha"] = settings["network.alpha"]
    if settings.get("train.unet_lr") is not None:
        values.pop("train.lr")
    if out.family not in FLOW:
        values.pop("train.timestep_type")
    implied = {name: value for name, value in values.items() if settings.get(name) is None}
    complete = {**settings, **implied}
    translate(
        {name: value for name, value in complete.items() if not name.startswith("datasets.")}, AI_TOOLKIT, out=out
    )
    put_folders(out, read_folders(settings, out))
    _finish(out, complete)
    return implied


def _finish(out: Translation, settings: OtherSettings) -> None:
    fields = out.fields
    kind = normalize_name(settings.get("network.type"))
    convolutions = not is_off(settings.get("network.conv")) and kind != "lokr" and out.family not in FLOW
    fields["network"] = {
        "lora": "locon" if convolutions else "lora",
        "locon": "locon",
        "lokr": "lokr",
        "dora": "dora",
    }.get(kind, "lora")
    if fields["network"] == "locon":
        conv = parse_int(settings.get("network.conv") or settings.get("network.linear") or fields.get("rank", 4))
        fields["conv_rank"] = conv
        fields["conv_alpha"] = parse_number(settings.get("network.conv_alpha") or conv)
    if kind == "lokr" and not is_off(settings.get("network.lokr_full_rank")):
        fields["rank"] = 2**20  # more than any factor has: both stay whole
        fields["alpha"] = float(fields["rank"])
    elif kind != "lokr" and out.family in FLOW and fields.get("alpha") != fields["rank"]:
        fields["alpha"] = float(fields["rank"])
        out.note("network.linear_alpha", "adapters of transformers have alpha = rank there, whatever it says")
    if "targets" not in fields:
        whole = is_off(settings.get("network.transformer_only", True))
        fields["targets"] = everything() if whole else toolkit_targets(out.family, convolutions)
    flow = out.family in FLOW
    scheduler = normalize_name(settings.get("train.noise_scheduler"))
    if (
        flow != (scheduler == "flowmatch")
        and "train.noise_scheduler" in settings
        and not (flow and scheduler == "ddpm")
    ):
        out.refuse("train.noise_scheduler", f"{for_message(settings['train.noise_scheduler'])} does not fit this model")
    fields["objective"] = (
        "flow" if flow else "v_prediction" if not is_off(settings.get("model.is_v_pred")) else "epsilon"
    )
    if not flow:
        fields["timestep_sampling"] = "uniform"
    if fields.get("train_text_encoders") and flow:
        out.refuse("train.train_text_encoder", "the text encoders of this model are not trained")
    _optimizer(out, settings)
    _encoder_rate(out, settings)
    refuse_hidden_dropout(out, "network.dropout")
    _micro_steps(out, settings)
    trigger = fields.get("trigger")
    if trigger:
        fields["sample_prompts"] = [each.replace("[trigger]", trigger) for each in fields.get("sample_prompts", [])]
    if not fields.get("sample_prompts"):
        fields["sample_every"] = 0


def _encoder_rate(out: Translation, settings: OtherSettings) -> None:
    """Without a rate of their own, text encoders have the common one, and not that of the UNet."""
    rates = [settings.get(f"train.{name}") for name in ("lr", "unet_lr", "text_encoder_lr")]
    if out.fields.get("train_text_encoders") and rates[0] is not None and rates[1] is not None and rates[2] is None:
        out.fields["text_encoder_learning_rate"] = parse_number(rates[0])
        out.mapping["train.lr"] = "text_encoder_learning_rate"


def _micro_steps(out: Translation, settings: OtherSettings) -> None:
    """gradient_accumulation_steps, the older of two ways, counts every batch as a step."""
    name = "train.gradient_accumulation_steps"
    count = parse_int(settings.get(name) or 1)
    if count <= 1:
        return
    intervals = [each for each in ("steps", "save_every", "sample_every") if out.fields.get(each)]
    uneven = [each for each in intervals if parse_int(out.fields[each]) % count]
    if uneven:
        why = f"a step is a batch there, and {uneven[0]} = {out.fields[uneven[0]]} is no multiple of it"
        out.refuse(name, f"{count}: {why}; gradient_accumulation counts steps of the optimizer")
        return
    for each in intervals:
        out.fields[each] = parse_int(out.fields[each]) // count
    out.note(name, f"a step is a batch there: {', '.join(intervals)} are divided by {count}")


def _optimizer(out: Translation, settings: OtherSettings) -> None:
    """Its optimizers share one epsilon; adaptive ones start at a rate of 1."""
    name = settings.get("train.optimizer")
    kind = normalize_name(name)
    plain = {"adam": "adamw", "adam8bit": "adamw8bit", "adam8": "adamw8bit"}.get(kind)
    if plain and is_off(settings.get("train.optimizer_params.weight_decay")):
        out.fields["optimizer"] = plain  # without decay they are one
        out.fields["weight_decay"] = 0.0
    elif ours := our_optimizer(name):
        out.fields["optimizer"] = ours
        if kind == "adamw8":  # a class of its own, without decay
            out.fields.setdefault("weight_decay", 0.0)
    else:
        out.refuse("train.optimizer", f"{for_message(name)} is not supported", "optimizer")
    out.mapping["train.optimizer"] = "optimizer"
    if (kind.startswith(("prodigy", "dadapt"))) and parse_number(out.fields.get("learning_rate", 1)) < 0.1:
        out.fields["learning_rate"] = 1.0
        out.note("train.lr", "adaptive optimizers start at 1 there")
    if kind == "adafactor":
        out.fields.setdefault("optimizer_args", {"scale_parameter": False})
    out.fields.setdefault("epsilon", defaults("ai_toolkit", "optimizer")["eps"])
    with_library_defaults(out)


def _timesteps(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if out.family not in FLOW:
        out.note(name, "only used by flow models")
    else:
        choice("timestep_sampling", {"sigmoid": "sigmoid", "linear": "uniform"})(out, name, value, settings)


def _filters(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    patterns = substring_patterns(value)
    if not patterns:
        out.unset.append(name)
    elif name.endswith("only_if_contains"):
        out.put(name, "targets", patterns)
    else:
        out.add_rules(name, [{"pattern": pattern, "skip": True} for pattern in patterns])


def _accumulation(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if parse_int(value) > 1:
        out.put(name, "gradient_accumulation", parse_int(value))
    elif parse_int(value) < 0:
        out.refuse(name, f"{for_message(value)}: gradients are accumulated over a number of batches")
    else:
        out.unset.append(name)


def _schedule(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    if normalize_name(value) in ("linear", "step", "cosinewithrestarts"):
        out.refuse(name, f"{for_message(value)} is another curve in ai-toolkit", "lr_scheduler")
        return
    lr_scheduler(out, name, value, settings)
    if normalize_name(value) == "constantwithwarmup":
        out.fields["warmup"] = parse_int(settings.get("train.lr_scheduler_params.num_warmup_steps") or 1000)


def _range_of_steps(neutral: tuple[int, ...]) -> Any:
    def read(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
        if parse_int(value) in neutral:
            out.unset.append(name)
        else:
            out.refuse(
                name, f"{for_message(value)}: places in a schedule, of which 0 is pure noise, are not chosen here"
            )

    return read


def _loss(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    choice("loss", {"mse": "mse", "mae": "l1"})(out, name, value, settings)


def _ema(out: Translation, name: str, value: Any, settings: OtherSettings) -> None:
    decay = parse_number(settings.get("train.ema_config.ema_decay") or 0.999)
    out.put(name, "ema_decay", decay if parse_bool(value) else 0.0)
    for key, plain in (("use_feedback", 0), ("param_multiplier", 1)):
        option = settings.get(f"train.ema_config.{key}")
        if parse_bool(value) and not is_off(option) and option != plain:
            out.refuse(f"train.ema_config.{key}", f"{for_message(option)}: the average does not change the weights")


def _uses_wandb(settings: OtherSettings) -> bool:
    return not is_off(settings.get("logging.use_wandb"))


AI_TOOLKIT: Final = SettingsDialect(
    plain={
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
    },
    readers={
        "network.network_kwargs.only_if_contains": _filters, "network.network_kwargs.ignore_if_contains": _filters,
        "save.dtype": save_dtype, "train.dtype": precision, "train.lr_scheduler": _schedule,
        "train.lr": lambda out, name, value, settings: (
            out.note(name, "unet_lr is used") if settings.get("train.unet_lr") else out.put(name, "learning_rate", value)),
        "train.text_encoder_lr": used_if("text_encoder_learning_rate", lambda g: not is_off(g.get("train.train_text_encoder")),
                                         "text encoders are not trained"),
        "train.gradient_accumulation_steps": _accumulation, "train.timestep_type": _timesteps,
        "train.gradient_checkpointing": switch("gradient_checkpointing", "full", "off"),
        "logging.use_wandb": switch("wandb", True, False), "logging.project_name": used_if("wandb_project", _uses_wandb, LOGS),
        "logging.run_name": used_if("wandb_run_name", _uses_wandb, LOGS),
        "train.min_snr_gamma": min_snr,
        "train.optimizer_params.betas": lambda out, name, value, settings: out.put(
            name, "betas", tuple(parse_number(each) for each in value)),
        "train.ema_config.use_ema": _ema, "train.loss_type": _loss,
        "train.disable_sampling": lambda out, name, value, settings: (
            out.put(name, "sample_every", 0) if parse_bool(value) else out.unset.append(name)),
        "sample.sample_every": used_if(
            "sample_every", lambda g: is_off(g.get("train.disable_sampling")), "disable_sampling is on"),
        "sample.samples.*": sample_prompt,
        "train.min_denoising_steps": _range_of_steps((0,)),
        "train.max_denoising_steps": _range_of_steps((999, 1000)),
        "model.vae_path": lambda out, name, value, settings: out.put(name, "parts", {"vae": value}),
        "train.cache_text_embeddings": lambda out, name, value, settings: (
            out.put(name, "cache_text", True) if parse_bool(value) else out.unset.append(name)),
    },
    harmless={
        **dict.fromkeys(["job", "meta.*", "type", "performance_log_every", "sqlite_db_path", "save.save_format", "log_dir",
                         "config.training_folder", "config.device", "config.is_*", "config.base_model", "ui_*"],
                        "does not affect training"),
        **dict.fromkeys(["model.is_*", "model.arch", "model.model_kwargs*", "model.dtype", "model.*_dtype", "sample.sampler",
                         "train.noise_scheduler", "model.use_flux_cfg", "model.latent_space*", "model.experimental_xl"], OWN_FILE),
        **dict.fromkeys(["sample.*", "train.skip_first_sample", "train.force_first_sample", "train.free_u",
                         "train.show_turbo_outputs"], "samples use the model's own settings"),
        **dict.fromkeys(["train.ema_config.*", "network.transformer_only", "train.unload_text_encoder", "network.type",
                         "network.lokr_full_rank", "model.qtype*", "network.conv", "network.conv_alpha", "network.alpha",
                         "train.optimizer", "train.lr_scheduler_params.num_warmup_steps", "train.content_or_style_reg",
                         "train.lr_scheduler_params.total_iters", "train.refiner_lr", "train.embedding_lr", "train.adapter_lr",
                         "train.inverted_mask_prior_multiplier", "train.diff_output_preservation_*", "train.start_step",
                         "train.blank_prompt_preservation_*", "train.train_refiner", "train.next_sample_timesteps",
                         "network.old_lokr_format", "train.target_norm_std_value", "train.cfg_*", "train.max_cfg_scale",
                         "train.max_negative_prompts", "train.guidance_loss_target", "network.split_multistage_loras",
                         "train.paramiter_swapping_factor", "train.correct_pred_norm_multiplier", "train.num_train_timesteps",
                         "train.*_feature_*_weight", "train.*_feature_loss_weight"], ELSEWHERE),
        **dict.fromkeys(["train.xformers", "train.sdp", "train.attention_backend", "model.compile*", "train.skip_*",
                         "model.*_device", "model.text_encoder_bits", "model.split_model*", "train.single_item_batching"], SPEED),
        **dict.fromkeys(["logging.*"], LOGS),
    },
    missing={
        **dict.fromkeys(["model.quantize*", "model.low_vram", "model.layer_offloading*", "model.accuracy_recovery_adapter",
                         "model.auto_memory", "train.do_paramiter_swapping"], MEMORY),
        **dict.fromkeys(["save.push_to_hub", "save.hf_*"], UPLOAD),
        **dict.fromkeys(["model.extras_name_or_path", "model.te_name_or_path", "model.unet_path"], "set parts"),
    },
    refused={
        **dict.fromkeys(["train.linear_timesteps*", "train.snr_gamma", "train.noise_multiplier", "train.content_or_style",
                         "train.*noise*", "train.weight_jitter", "train.learnable_snr_gos", "train.*multiplier",
                         "train.random_noise_*"], "timesteps and noise are sampled from the model's whole schedule"),
        **dict.fromkeys(["train.loss_target", "train.diff_output_preservation", "train.pred_scaler",
                         "train.blank_prompt_preservation", "train.inverted_mask_prior", "train.do_*", "train.target_norm_std",
                         "train.*_path", "train.correct_pred_norm", "train.match_adapter*", "train.train_turbo"],
                        "the loss is that of the model's own prediction"),
        **dict.fromkeys(["train.optimizer_params.*", "train.lr_scheduler_params.*", "train.prompt_*", "train.short_and_long*",
                         "train.negative_prompt", "train.bypass_guidance_embedding", "train.adaptive_scaling_factor",
                         "train.standardize_*", "train.merge_network_on_save", "train.unconditional_prompt",
                         "train.switch_boundary_every", "train.adapter_assist*"], "is not supported"),
        **dict.fromkeys(["model.assistant_lora_path", "model.lora_path", "model.inference_lora_path",
                         "model.refiner_name_or_path", "model.attn_masking", "model.only_if_contains",
                         "model.ignore_if_contains"], "the base model is used as it is"),
        "network.network_kwargs.*": "is not supported", "network.lorm*": "is not supported",
    },
    neutral={"train.content_or_style": ("balanced",), "train.loss_target": ("noise",),
             "train.switch_boundary_every": (1,), "train.noise_multiplier": (1.0,), "train.*noise*": (1.0,),
             "train.*multiplier": (1.0,), "save.hf_*": (True,), "train.pred_scaler": (1.0,),
             "train.lr_scheduler_params.*": (0,), "train.adapter_assist*": ("t2i",)},
)  # fmt: skip
