"""The metadata of a trained file: keys that other programs read (kohya's ss_*, modelspec.*), and the configuration.

It contains no path of the data, the model or the output on the machine that trained it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inweave.exchange.hashes import hash_file
from inweave.files.paths import exists
from inweave.training.adapters.summary import Shape
from inweave.training.config.fields import ACCOUNT, names_where
from inweave.training.config.schema import TrainConfig
from inweave.version import __version__


def training_metadata(
    config: TrainConfig,
    shape: Shape,
    model: Any,
    steps: tuple[int, int, float],
    started: float,
    data: Mapping[str, str],
) -> dict[str, str]:
    """Return the metadata of an adapter; ``steps``: (done, in total, per epoch); ``data``: the task's own metadata."""
    step, total, epoch = steps
    prediction = getattr(model, "prediction", "")
    family = getattr(model, "family", None)
    version, architecture = family.file_labels(model.blueprint.variant, prediction) if family else ("llm", "llm")
    encoder_rate = (
        f"{config.text_encoder_learning_rate or config.learning_rate:g}" if config.train_text_encoders else "None"
    )
    metadata = {
        "ss_output_name": config.name,
        "ss_base_model_version": version,
        "ss_sd_model_name": str(getattr(model, "name", config.model)),
        "ss_v2": str(version == "sd_v2"),
        **_network(shape),
        "ss_steps": str(step),
        "ss_epoch": str(math.ceil(step / epoch)),
        "ss_num_epochs": str(math.ceil(total / epoch)),
        "ss_max_train_steps": str(total),
        "ss_lr_warmup_steps": str(config.warmup_steps(total)),
        "ss_max_grad_norm": f"{config.max_grad_norm:g}",
        "ss_batch_size_per_device": str(config.batch_size),
        "ss_gradient_accumulation_steps": str(config.gradient_accumulation),
        "ss_learning_rate": f"{config.learning_rate:g}",
        "ss_unet_lr": f"{config.learning_rate:g}" if config.train_denoiser else "None",
        "ss_text_encoder_lr": encoder_rate,
        "ss_optimizer": config.optimizer,
        "ss_lr_scheduler": config.lr_scheduler,
        "ss_mixed_precision": config.precision if config.precision in ("bf16", "fp16") else "no",
        "ss_seed": str(config.seed),
        "ss_caption_dropout_rate": f"{config.caption_dropout:g}",
        "ss_min_snr_gamma": str(config.min_snr_gamma),
        "ss_noise_offset": f"{config.noise_offset:g}",
        "ss_prior_loss_weight": f"{config.prior_loss_weight:g}",
        "ss_enable_bucket": str(config.buckets),
        "ss_clip_skip": str(config.clip_skip),
        "ss_training_started_at": f"{started:.3f}",
        "ss_training_finished_at": f"{time.time():.3f}",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": "diffusers" if family else "transformers",
        "modelspec.title": config.name,
        "modelspec.date": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "inweave.version": __version__,
        "inweave.config": public_config(config).to_toml(without=names_where(private=True) | ACCOUNT),
    }  # fmt: skip
    if config.trigger:
        metadata["modelspec.trigger_phrase"] = config.trigger
    if sides := re.findall(r"\d+", data.get("ss_resolution", "")):
        metadata["modelspec.resolution"] = "x".join(sides)
    if prediction in ("epsilon", "v_prediction"):
        metadata["modelspec.prediction_type"] = "v" if prediction == "v_prediction" else "epsilon"
    # a file name may have bytes that are not text, which must not keep a trained file from being written
    return {key: value.encode("utf-8", "backslashreplace").decode() for key, value in (metadata | dict(data)).items()}


def _network(shape: Shape) -> dict[str, str]:
    """Describe the network in the terms of kohya's scripts, or of LyCORIS for DoRA, LoHa and LoKr."""
    lycoris = {"lora", "locon"}.isdisjoint(shape.kinds)
    arguments = {
        "algo": shape.network if lycoris and "dora" not in shape.kinds else "lora",
        "dora_wd": str("dora" in shape.kinds),
        "rs_lora": str(True in shape.rslora),
    }
    if shape.norms:
        arguments["train_norm"] = "True"
    if shape.wide_ranks:
        arguments |= {"conv_dim": str(shape.usual("wide_ranks")), "conv_alpha": f"{shape.usual('wide_alphas'):g}"}
    rank, alpha = shape.usual("ranks"), shape.usual("alphas")
    if not shape.ranks:
        rank, alpha = shape.usual("wide_ranks"), shape.usual("wide_alphas")
    return {
        "ss_network_module": "lycoris.kohya" if lycoris else "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": f"{alpha:g}" if alpha is not None else "None",
        "ss_network_args": json.dumps(arguments),
    }


def public_config(config: TrainConfig) -> TrainConfig:
    """Reduce paths to their last part: folder names are private, and may name the user."""

    def last_part(value: str) -> str:
        return Path(value).name if exists(value) or Path(value).is_absolute() else value

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: last_part(each) if key == "image_dir" else public(each) for key, each in value.items()}
        return [public(each) for each in value] if isinstance(value, list) else value

    paths: dict[str, Any] = {
        name: last_part(value) for name in ("model", "start_from") if (value := getattr(config, name))
    }
    paths["dataset"] = last_part(config.dataset) if isinstance(config.dataset, str) else public(config.dataset)
    if config.parts:
        paths["parts"] = {part: last_part(value) for part, value in config.parts.items()}
    if config.sample_prompts:
        paths["sample_prompts"] = tuple(map(last_part, config.sample_prompts))
    return config.model_copy(update={name: value for name, value in paths.items() if name in config.model_fields_set})


def base_hashes(path: Path | None) -> dict[str, str]:
    """Return the hashes of a single-file base model, under kohya's names; none without a file."""
    if path is None:
        return {}
    hashes = hash_file(path)
    short = {} if hashes.autov1 is None else {"ss_sd_model_hash": hashes.autov1}
    return {**short, "ss_new_sd_model_hash": hashes.sha256}
