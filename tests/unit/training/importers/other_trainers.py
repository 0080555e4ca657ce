"""Configurations of other trainers with many settings, for the tests of their import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inweave.training.importers.detect import Imported

KOHYA = """
[model]
pretrained_model_name_or_path = "models/sd_xl_base_1.0.safetensors"
vae = "models/sdxl_vae.safetensors"
v2 = false

[data]
train_data_dir = "pictures/marble"
resolution = "1024,1024"
enable_bucket = true
min_bucket_reso = 512
max_bucket_reso = 2048
bucket_reso_steps = 32
bucket_no_upscale = true
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 2
flip_aug = true
caption_dropout_rate = 0.05
max_data_loader_n_workers = 4

[network]
network_module = "lycoris.kohya"
network_dim = 32
network_alpha = 16
network_args = ["algo=lokr", "factor=8", "preset=attn-mlp", "use_tucker=True", "conv_dim=8"]
network_train_unet_only = true

[training]
max_train_epochs = 12
max_train_steps = 9000
train_batch_size = 4
gradient_accumulation_steps = 2
gradient_checkpointing = true
mixed_precision = "bf16"
learning_rate = 1e-5
unet_lr = 3e-4
text_encoder_lr = [5e-5, 5e-5]
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.05", "betas=0.9,0.99"]
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = 3
lr_warmup_steps = 0.1
min_snr_gamma = 5
noise_offset = 0.0357
max_grad_norm = 1.0
seed = 1234
cache_latents = true
cache_latents_to_disk = true
sdpa = true
fp8_base = true
multires_noise_iterations = 6
multires_noise_discount = 0.3

[saving]
output_dir = "trained"
output_name = "marble_v1"
save_model_as = "safetensors"
save_precision = "fp16"
save_every_n_steps = 500
save_last_n_steps = 1500
save_every_n_epochs = 1
sample_every_n_steps = 250
sample_prompts = "prompts.txt"
log_with = "tensorboard"
logging_dir = "logs"
my_own_extra = 7
"""


#: OneTrainer saves every part of every model it knows
ONE_TRAINER: dict[str, Any] = {
    "__version": 10,
    "training_method": "LORA",
    "model_type": "FLUX_DEV_1",
    "base_model_name": "black-forest-labs/FLUX.1-dev",
    "workspace_dir": "workspace/run",
    "cache_dir": "workspace-cache/run",
    "tensorboard": True,
    "continue_last_backup": False,
    "output_dtype": "BFLOAT_16",
    "output_model_format": "SAFETENSORS",
    "output_model_destination": "models/knight.safetensors",
    "concept_file_name": "training_concepts/knight.json",
    "concepts": [
        {
            "__version": 1,
            "name": "knight",
            "path": "pictures/knight",
            "enabled": True,
            "seed": -7,
            "balancing": 1.0,
            "loss_weight": 1.0,
            "include_subdirectories": False,
            "image_variations": 1,
            "text_variations": 3,
            "image": {"enable_crop_jitter": True, "enable_random_flip": True, "random_rotate_max_angle": 0.0},
            "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "tag_delimiter": ",",
                     "keep_tags_count": 1},
        },
        {"name": "armour", "path": "pictures/armour", "enabled": True},
        {"name": "old", "path": "pictures/old", "enabled": False},
    ],
    "aspect_ratio_bucketing": True,
    "latent_caching": True,
    "learning_rate_scheduler": "COSINE",
    "learning_rate": 0.0003,
    "learning_rate_warmup_steps": 100.0,
    "learning_rate_cycles": 1.0,
    "epochs": 40,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "ema": "GPU",
    "ema_decay": 0.998,
    "dataloader_threads": 2,
    "train_device": "cuda",
    "temp_device": "cpu",
    "train_dtype": "BFLOAT_16",
    "resolution": "768",
    "attention_mechanism": "SDP",
    "mse_strength": 1.0,
    "mae_strength": 0.0,
    "loss_weight_fn": "CONSTANT",
    "loss_weight_strength": 5.0,
    "dropout_probability": 0.0,
    "loss_scaler": "NONE",
    "offset_noise_weight": 0.0,
    "timestep_distribution": "LOGIT_NORMAL",
    "noising_weight": 0.0,
    "noising_bias": 0.0,
    "timestep_shift": 1.0,
    "dynamic_timestep_shifting": True,
    "unet": {"train": True, "learning_rate": None, "weight_dtype": "FLOAT_32"},
    "prior": {"train": True, "model_name": ""},
    "transformer": {
        "model_name": "",
        "train": True,
        "learning_rate": None,
        "weight_dtype": "NFLOAT_4",
        "guidance_scale": 1.0,
        "attention_mask": False,
        "stop_training_after": None,
        "stop_training_after_unit": "NEVER",
    },
    "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16", "dropout_probability": 0.1},
    "text_encoder_2": {"train": False, "weight_dtype": "BFLOAT_16", "dropout_probability": 0.1},
    "text_encoder_layer_skip": 0, "vae": {"model_name": "", "weight_dtype": "FLOAT_32"},
    "masked_training": False,
    "unmasked_probability": 0.1,
    "peft_type": "LORA",
    "lora_rank": 24,
    "lora_alpha": 12.0,
    "lora_decompose": True,
    "lokr_dim": 16,
    "layer_filter_preset": "attn-mlp",
    "layer_filter": "attn,ff.net",
    "optimizer": {"__version": 0, "optimizer": "PRODIGY", "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01,
                  "d_coef": 2.0, "eps": 1e-8, "fused": False},
    "optimizer_defaults": {"ADAMW": {"optimizer": "ADAMW", "beta1": 0.9}},
    "sample_after": 10,
    "sample_after_unit": "MINUTE",
    "save_every": 500,
    "save_every_unit": "STEP",
    "additional_embeddings": [],
    "secrets": {"huggingface_token": "a-secret"},
    "perturbation_noise_weight": 0.2,
    "something_new": {"deep": [{"x": 3}]},
}  # fmt: skip


AI_TOOLKIT = """
---
job: extension
config:
  name: "harbour_v2"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      device: cuda:0
      trigger_word: "h4rbour"
      network:
        type: "lora"
        linear: 32
        linear_alpha: 16
        network_kwargs:
          ignore_if_contains: ["single_transformer_blocks.0."]
      save:
        dtype: float16
        save_every: 250
        max_step_saves_to_keep: 4
        push_to_hub: false
      datasets:
        - folder_path: "/data/harbour"
          caption_ext: "txt"
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          cache_latents_to_disk: true
          resolution: [ 512, 768, 1024 ]
          num_repeats: 3
        - folder_path: "/data/boats"
          caption_ext: "txt"
      train:
        batch_size: 1
        steps: 1500
        gradient_accumulation_steps: 1
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: "flowmatch"
        optimizer: "adamw8bit"
        optimizer_params:
          weight_decay: 1e-4
        lr: 1e-4
        content_or_style: balanced
        ema_config:
          use_ema: true
          ema_decay: 0.99
        dtype: bf16
      model:
        name_or_path: "black-forest-labs/FLUX.1-dev"
        is_flux: true
        quantize: true
      sample:
        sampler: "flowmatch"
        sample_every: 250
        width: 1024
        height: 1024
        prompts:
          - "[trigger] at dawn"
          - "a lighthouse, h4rbour"
        neg: ""
        seed: 7
        walk_seed: true
        guidance_scale: 4
        sample_steps: 20
meta:
  name: "[name]"
  version: '1.0'
"""


def write_text(folder: Path, text: str, name: str = "run.txt") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def accounted(result: Imported, name: str) -> bool:
    """A setting is translated, unsupported or ignored, as a whole or entry by entry."""
    names = [*result.mapping, *(each.split(": ")[0] for each in (*result.no_equivalent, *result.notes))]
    return any(each == name or each.startswith(f"{name}.") for each in names)
