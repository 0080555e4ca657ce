"""Files of LoRA_Easy_Training_Scripts: tabs, their tables of arguments, and the dataset that they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import import_config
from tests.unit.training.importers.other_trainers import write_text

EASY = """
[[subsets]]
name = "cats"
num_repeats = 3
keep_tokens = 1
caption_extension = ".txt"
shuffle_caption = true
flip_aug = false
image_dir = "photos/cats"

[[subsets]]
num_repeats = 1
caption_extension = ".txt"
is_reg = true
image_dir = "photos/reg"

[train_mode]
train_mode = "lora"

[general_args.args]
pretrained_model_name_or_path = "models/sdxl.safetensors"
mixed_precision = "bf16"
max_train_epochs = 4
max_token_length = 225
seed = 23
sdxl = true
xformers = true

[general_args.dataset_args]
resolution = 1024
batch_size = 2

[network_args.args]
network_dim = 8
network_alpha = 4.0
min_timestep = 0
max_timestep = 1000

[network_args.args.network_args]
conv_dim = 4
conv_alpha = 1.0
algo = "locon"

[optimizer_args.args]
optimizer_type = "AdamW8bit"
lr_scheduler = "cosine"
learning_rate = 0.0001
unet_lr = 0.0002
text_encoder_lr = 5e-5
warmup_ratio = 0.1

[optimizer_args.args.optimizer_args]
weight_decay = "0.1"
betas = "0.9,0.99"

[saving_args.args]
output_dir = "out"
output_name = "cats"
save_precision = "fp16"

[bucket_args.dataset_args]
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 2048
bucket_reso_steps = 64
"""


def test_easy_training_scripts(tmp_path: Path) -> None:
    result = import_config(write_text(tmp_path, EASY, "easy.toml"))
    c = result.config
    assert (result.kind, c.model, c.network, c.rank) == (
        "LoRA_Easy_Training_Scripts",
        "models/sdxl.safetensors",
        "locon",
        8,
    )
    assert (c.alpha, c.conv_rank, c.conv_alpha, c.max_token_length, c.seed, c.epochs) == (4, 4, 1, 225, 23, 4)
    assert (c.optimizer, c.weight_decay, c.betas, c.warmup) == ("adamw8bit", 0.1, (0.9, 0.99), 0.1)
    assert (c.learning_rate, c.text_encoder_learning_rate, c.name) == (2e-4, 5e-5, "cats")
    assert isinstance(c.dataset, dict)
    assert c.dataset["general"] == {
        "balance_regularization": True, "resolution": 1024, "batch_size": 2,
        "enable_bucket": True, "min_bucket_reso": 256, "max_bucket_reso": 2048, "bucket_reso_steps": 64,
    }  # fmt: skip
    cats, prior = c.dataset["datasets"][0]["subsets"]
    assert cats == {
        "num_repeats": 3, "keep_tokens": 1, "caption_extension": ".txt", "shuffle_caption": True,
        "image_dir": "photos/cats",
    }  # fmt: skip
    assert prior["is_reg"] is True
    assert not any("not known" in line for line in result.no_equivalent), result.no_equivalent


def test_what_it_would_train_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_fa"):
        import_config(write_text(tmp_path, EASY.replace("network_dim = 8", "network_dim = 8\nfa = true")))
