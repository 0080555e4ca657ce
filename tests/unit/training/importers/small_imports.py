"""Small configurations of every trainer, and their imports, for the tests of what an import is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import Imported, import_config

GUI: dict[str, Any] = {
    "LoRA_type": "Standard", "adaptive_noise_scale": 0, "additional_parameters": "", "block_dims": "",
    "caption_extension": ".txt",
    "clip_skip": "1", "color_aug": False, "conv_dim": 8, "conv_alpha": 4, "epoch": 3, "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup": 10, "max_resolution": "1024,1024", "max_timestep": 1000, "max_token_length": "75",
    "max_train_epochs": "", "max_train_steps": "", "min_snr_gamma": 0, "mixed_precision": "bf16", "module_dropout": 0,
    "multires_noise_iterations": 0,
    "network_alpha": 16, "network_dim": 32, "noise_offset": 0, "noise_offset_type": "Original",
    "optimizer": "AdamW8bit",
    "optimizer_args": "", "resume": "", "sdxl": True, "sdxl_cache_text_encoder_outputs": False,
    "sdxl_no_half_vae": True,
    "seed": "", "stop_text_encoder_training_pct": 0, "text_encoder_lr": 5e-5, "unet_lr": 1e-4, "train_batch_size": 2,
    "up_lr_weight": "",
    "weighted_captions": False, "xformers": "xformers", "v2": False, "save_every_n_epochs": 0, "scale_weight_norms": 0,
}  # fmt: skip
TOOLKIT: dict[str, Any] = {
    "type": "sd_trainer", "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
    "datasets": [{"folder_path": "x"}],
    "train": {"steps": 20, "noise_scheduler": "flowmatch", "lr": 1e-4, "dtype": "bf16", "optimizer": "adamw8bit"},
    "model": {"name_or_path": "m", "arch": "flux"},
}  # fmt: skip
ONE: dict[str, Any] = {
    "training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x",
    "text_encoder": {"train": False}, "text_encoder_2": {"train": False},
}  # fmt: skip
TUNER: dict[str, Any] = {
    "model_family": "sdxl", "model_type": "lora", "optimizer": "adamw_bf16", "lr_scheduler": "constant",
    "max_train_steps": 9,
}  # fmt: skip
SHELL = (
    "accelerate launch train_network.py --network_module networks.lora --resolution 512 "
    "--pretrained_model_name_or_path m"
)


def imported(tmp_path: Path, table: dict[str, Any], **options: Any) -> Imported:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(table), "utf-8")
    return import_config(path, **{"dataset": "pictures", **options})


def gui(tmp_path: Path, **changes: Any) -> TrainConfig:
    return imported(tmp_path, {**GUI, **changes}).config


def toolkit(tmp_path: Path, **changes: Any) -> Imported:
    process = {**TOOLKIT, **changes}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({"job": "extension", "config": {"name": "n", "process": [process]}}), "utf-8")
    return import_config(path)


def refusal(error: pytest.ExceptionInfo[ConfigError]) -> str:
    (problem,) = error.value.problems  # one reason
    return str(problem)
