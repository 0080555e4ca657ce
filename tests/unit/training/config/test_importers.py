"""Rivals' files become ours: every setting is accounted for, and hostile files are refused in words."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.config.importers.ai_toolkit import AI_TOOLKIT as TOOLKIT_DIALECT
from inweave.training.config.importers.detect import Imported, import_config, import_table
from inweave.training.config.importers.files import leaves_of
from inweave.training.config.importers.kohya import KOHYA as KOHYA_DIALECT
from inweave.training.config.importers.onetrainer import ONE_TRAINER as ONE_TRAINER_DIALECT
from inweave.training.config.importers.simpletuner import SIMPLE_TUNER as TUNER_DIALECT
from inweave.training.config.schema import TrainConfig

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
            "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "tag_delimiter": ",", "keep_tags_count": 1},
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
    "text_encoder_layer_skip": 0,
    "vae": {"model_name": "", "weight_dtype": "FLOAT_32"},
    "masked_training": False,
    "unmasked_probability": 0.1,
    "peft_type": "LORA",
    "lora_rank": 24,
    "lora_alpha": 12.0,
    "lora_decompose": True,
    "lokr_dim": 16,
    "layer_filter_preset": "attn-mlp",
    "layer_filter": "attn,ff.net",
    "optimizer": {"__version": 0, "optimizer": "PRODIGY", "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "d_coef": 2.0,
                  "eps": 1e-8, "fused": False},
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


def test_kohya(tmp_path: Path) -> None:
    import tomllib

    with pytest.raises(ConfigError, match=r"network_args\.use_tucker") as caught:
        import_config(write_text(tmp_path, KOHYA.replace("attn-mlp", "full")))
    assert len(caught.value.problems) == 1
    result = import_config(
        write_text(tmp_path, KOHYA), without=["multires_noise_iterations", "multires_noise_discount"]
    )
    c = result.config
    assert result.kind == "kohya"
    assert (c.network, c.rank, c.alpha, c.lokr_factor, c.conv_rank) == ("lokr", 32, 16, 8, None)
    assert re.fullmatch(c.targets[0], "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj")
    assert not re.fullmatch(c.targets[0], "down_blocks.1.resnets.0.conv1")
    assert (c.epochs, c.steps, c.batch_size, c.gradient_accumulation) == (12, None, 4, 2)
    assert (c.learning_rate, c.train_text_encoders, c.precision) == (3e-4, False, "bf16")
    assert (c.optimizer, c.weight_decay, c.betas, c.lr_scheduler, c.cosine_cycles, c.warmup) == (
        "adamw8bit", 0.05, (0.9, 0.99), "cosine", 3, 0.1,
    )  # fmt: skip
    assert (c.resolution, c.buckets, c.min_bucket, c.max_bucket, c.bucket_step, c.upscale) == (
        1024,
        True,
        512,
        2048,
        32,
        False,
    )
    assert (c.caption_extensions, c.shuffle_tags, c.keep_tokens, c.flip) == ((".txt",), True, 2, True)
    assert (c.save_every, c.keep_last, c.sample_every, c.sample_prompts) == (500, 3, 250, ("prompts.txt",))
    assert (c.model, c.parts, c.output, c.name, c.seed) == (
        "models/sd_xl_base_1.0.safetensors", {"vae": "models/sdxl_vae.safetensors"}, "trained", "marble_v1", 1234,
    )  # fmt: skip
    missed = {each.split(":")[0] for each in result.no_equivalent}
    assert {"fp8_base", "my_own_extra"} <= missed
    later = {
        "multires_noise_iterations",
        "multires_noise_discount",
        "save_every_n_epochs",
    }  # where there are such settings
    assert missed - later == {"fp8_base", "my_own_extra"}
    assert result.mapping["network_dim"] == "rank" and result.mapping["unet_lr"] == "learning_rate"
    for section in tomllib.loads(KOHYA).values():
        for name in section:
            assert accounted(result, name), name


def test_kohya_is_silent_about_what_it_does(tmp_path: Path) -> None:
    """Its defaults are not ours: a file without them must not train something else here."""
    result = import_config(write_text(tmp_path, 'train_data_dir = "x"\nnetwork_dim = 16\nlearning_rate = 1e-4\n'))
    c = result.config
    assert (c.alpha, c.steps, c.precision, c.buckets, c.upscale) == (1, 1600, "fp32", False, True)
    assert c.caption_extensions == (".caption",)
    assert (c.train_text_encoders, c.text_encoder_learning_rate, c.cache_text) == (True, 1e-4, False)
    assert any(note.startswith("network_alpha: not in the file") for note in result.notes)
    assert "network_alpha" not in result.mapping


@pytest.mark.parametrize("length", [75, 150, 225])
def test_captions_are_not_cut_at_kohyas_length(length: int, tmp_path: Path) -> None:
    result = import_config(
        write_text(tmp_path, f'train_data_dir = "x"\nnetwork_dim = 16\nmax_token_length = {length}\n')
    )
    assert not any("max_token_length" in each for each in result.no_equivalent)
    (note,) = (each for each in result.notes if each.startswith("max_token_length: "))
    assert "nothing is truncated" in note


def test_kohya_for_flux(tmp_path: Path) -> None:
    text = """
    pretrained_model_name_or_path = "flux1-dev.safetensors"
    clip_l = "clip_l.safetensors"
    t5xxl = "t5xxl_fp16.safetensors"
    ae = "ae.safetensors"
    dataset_config = "dataset.toml"
    network_module = "networks.lora_flux"
    network_dim = 16
    network_alpha = 16
    network_args = ["train_blocks=single", "split_qkv=False"]
    cache_text_encoder_outputs = true
    learning_rate = 1e-4
    max_train_steps = 1000
    mixed_precision = "bf16"
    timestep_sampling = "shift"
    discrete_flow_shift = 3.1582
    model_prediction_type = "raw"
    guidance_scale = 1.0
    """
    result = import_config(write_text(tmp_path, text))
    c = result.config
    assert c.parts == {
        "text_encoder": "clip_l.safetensors",
        "text_encoder_2": "t5xxl_fp16.safetensors",
        "vae": "ae.safetensors",
    }
    assert (c.dataset, c.timestep_sampling, c.timestep_shift, c.guidance, c.targets) == (
        "dataset.toml",
        "shift",
        3.1582,
        1.0,
        (r"single_transformer_blocks\.\d+\..+|.*layers\.\d+\.(self_attn|mlp)\..+",),
    )
    assert (c.train_text_encoders, c.cache_text, c.buckets) == (False, True, True)  # the dataset decides the crop
    assert [each.split(":")[0] for each in result.no_equivalent] == ["network_module"]  # q, k and v are not fused here
    again = write_text(tmp_path, c.to_toml(), "ours.toml")
    assert TrainConfig.load(again) == c == import_config(again).config
    mixed = write_text(tmp_path, 'train_data_dir = "x"\nrank = 8\nepochs = 2\nprecision = "bf16"\n')
    assert (import_config(mixed).config.rank, import_config(mixed).config.alpha) == (8, 1.0)


def test_one_trainer(tmp_path: Path) -> None:
    path = write_text(tmp_path, json.dumps(ONE_TRAINER))
    with pytest.raises(ConfigError, match=r"perturbation_noise_weight: 0\.2"):
        import_config(path)
    result = import_config(path, without=["perturbation_noise_weight"])
    c = result.config
    assert result.kind == "OneTrainer"
    assert (c.network, c.rank, c.alpha, c.targets) == ("dora", 24, 12, (r".*attn.*|.*ff\.net.*",))
    assert (c.epochs, c.batch_size, c.learning_rate, c.lr_scheduler, c.warmup, c.cosine_cycles) == (
        40,
        2,
        3e-4,
        "cosine",
        100,
        1,
    )
    assert (c.ema_decay, c.precision, c.save_dtype, c.resolution, c.device) == (0.998, "bf16", "bf16", 768, "cuda")
    assert (c.optimizer, c.betas, c.optimizer_args["d_coef"]) == ("prodigy", (0.9, 0.99), 2.0)
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std, c.caption_dropout, c.guidance) == (
        "shift",
        None,
        1.0,
        0.1,
        1.0,
    )
    assert isinstance(c.dataset, dict)
    assert [each["subsets"][0]["image_dir"] for each in c.dataset["datasets"]] == ["pictures/knight", "pictures/armour"]
    assert c.dataset["datasets"][1]["subsets"][0]["flip_aug"] is True  # OneTrainer's default
    assert (c.flip, c.shuffle_tags, c.keep_tokens, c.caption_variants) == (True, True, 1, 3)
    assert (c.output, c.name, c.save_every, c.train_text_encoders) == ("models", "knight", 500, False)
    missed = {each.split(":")[0] for each in result.no_equivalent}
    assert missed == {
        "transformer.weight_dtype",
        "perturbation_noise_weight",
        "something_new.deep.0.x",
        "ema_update_step_interval",
    }
    for name in leaves_of(ONE_TRAINER):
        assert accounted(result, name), name
    assert "a-secret" not in repr(result)


def test_one_trainer_presets_only_hold_what_differs(tmp_path: Path) -> None:
    preset = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "learning_rate": 0.0003,
              "base_model_name": "x", "concept_file_name": "concepts/c.json", "unet": {"train": True},
              "text_encoder": {"train": False}, "text_encoder_2": {"train": False}, "loss_weight_fn": "MIN_SNR_GAMMA",
              "resolution": "512,1024", "layer_filter_preset": "mine", "layer_filter": "attn1,attn2"}  # fmt: skip
    path = write_text(tmp_path, json.dumps(preset))
    with pytest.raises(ConfigError, match="dataset: is required"):
        import_config(path)
    assert import_config(path, dataset="there").config.dataset == "there"
    (tmp_path / "concepts").mkdir()
    write_text(tmp_path / "concepts", json.dumps([{"path": "off", "enabled": False}, {"path": "on"}]), "c.json")
    result = import_config(path)
    c = result.config
    assert (c.rank, c.alpha, c.warmup, c.precision) == (16, 1.0, 200, "fp16")
    assert (c.min_snr_gamma, c.targets) == (5, (".*attn1.*|.*attn2.*",))
    assert isinstance(c.dataset, dict)
    assert [(each["resolution"], each["subsets"][0]["image_dir"]) for each in c.dataset["datasets"]] == [
        (512, "on"),
        (1024, "on"),
    ]
    assert c.epochs == 50 and any("100 epochs are 50" in each for each in result.notes)


def test_ai_toolkit(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    result = import_config(write_text(tmp_path, AI_TOOLKIT))
    c = result.config
    assert result.kind == "ai-toolkit"
    assert (c.name, c.output, c.device, c.trigger, c.model) == (
        "harbour_v2", "output", "cuda:0", "h4rbour", "black-forest-labs/FLUX.1-dev",
    )  # fmt: skip
    assert (c.network, c.rank, c.alpha, c.rules[0].skip) == ("lora", 32, 16, True)
    assert re.search(c.rules[0].pattern, "single_transformer_blocks.0.attn.to_q")
    assert (c.steps, c.learning_rate, c.weight_decay, c.optimizer, c.ema_decay) == (1500, 1e-4, 1e-4, "adamw8bit", 0.99)
    assert (c.objective, c.timestep_sampling, c.precision, c.gradient_checkpointing) == (
        "flow",
        "sigmoid",
        "bf16",
        "full",
    )
    assert isinstance(c.dataset, dict)
    sets = [
        (each["resolution"], each["subsets"][0]["image_dir"], each["subsets"][0]["num_repeats"])
        for each in c.dataset["datasets"]
    ]
    assert sets == [*((side, "/data/harbour", 3) for side in (512, 768, 1024)), (512, "/data/boats", 1)]
    assert (c.caption_extensions, c.caption_dropout) == ((".txt",), 0.05)
    assert (c.save_every, c.keep_last, c.sample_every, c.sample_steps, c.sample_guidance) == (250, 4, 250, 20, 4)
    assert c.sample_prompts == ("h4rbour at dawn", "a lighthouse, h4rbour")
    assert [each.split(":")[0] for each in result.no_equivalent] == ["model.quantize"]
    for name in leaves_of(yaml.safe_load(AI_TOOLKIT)):
        assert accounted(result, name.removeprefix("config.process.0.")), name


def test_ai_toolkit_in_json_and_with_little_in_it(tmp_path: Path) -> None:
    process = {
        "network": {"type": "lora"},
        "datasets": [{"folder_path": "x"}],
        "model": {"name_or_path": "m"},
        "sample": {"samples": [{"prompt": "p"}]},
    }
    result = import_config(
        write_text(tmp_path, json.dumps({"job": "extension", "config": {"name": "n", "process": [process]}}))
    )
    c = result.config
    assert (c.rank, c.alpha, c.steps, c.learning_rate, c.precision) == (4, 1.0, 1000, 1e-6, "fp32")
    assert c.sample_prompts == ("p",)


def test_the_ending_does_not_matter(tmp_path: Path) -> None:
    ours = {**ONE_TRAINER, "perturbation_noise_weight": 0.0}
    assert import_config(write_text(tmp_path, json.dumps(ours), "run.toml")).kind == "OneTrainer"
    kohya = KOHYA.replace("multires_noise_iterations = 6", "")
    assert import_config(write_text(tmp_path, kohya, "run.json")).kind == "kohya"
    assert import_config(write_text(tmp_path, AI_TOOLKIT, "run.toml")).kind == "ai-toolkit"


def test_invalid_values_are_reported_under_their_original_names(tmp_path: Path) -> None:
    wrong = 'train_data_dir = "x"\nnetwork_dim = -3\nunet_lr = "fast"\nresolution = "wide"\nnetwork_args = "nonsense"\n'
    with pytest.raises(ConfigError) as caught:
        import_config(write_text(tmp_path, wrong))
    text = "\n".join(caught.value.problems)
    for word in ("network_dim (rank)", "unet_lr (learning_rate)", "resolution", "network_args", "run.txt"):
        assert word in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no settings"),
        ("just words", "no settings"),
        ("[1, 2]", "no settings"),
        ("{}", "no settings"),
        ('{"a": 1}', "is not recognized"),
        ("a = 1", "is not recognized"),
        ('{"training_method": "FINE_TUNE", "concepts": [{"path": "x"}]}', "FINE_TUNE: a full fine-tune"),
        ('{"training_method": "LORA"', "not valid JSON"),
        ("network_dim = \n", "line 1"),
        ("a: [", "neither TOML"),
        ("a: !!python/object/apply:os.system ['true']", "neither TOML"),
        ('[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "x"\n', "is a dataset"),
        ("[a]\nseed = 1\n[b]\nseed = 2\n", "set twice"),
    ],
)  # fmt: skip
def test_files_that_are_not_a_training_run_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InweaveError, match=message):
        import_config(write_text(tmp_path, text))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
HOSTILE = {
    "deep json": '{"config": {"process": ' + "[" * 50_000 + "]" * 50_000 + "}}",
    "deep json objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "deep toml": "network_dim = " + "[" * 50_000 + "]" * 50_000,
    "deep toml key": "a" + ".a" * 200_000 + " = 1",
    "deep yaml": "config: " + "[" * 5_000 + "]" * 5_000,
    "deep yaml maps": "".join(f"{' ' * i}a:\n" for i in range(400)),
    "laughs": "config: {process: [{}]}\n" + LAUGHS,
    "laughs inside": LAUGHS + "config:\n  process:\n    - x: *a39\n",
    "loop": "config: &c\n  process:\n    - *c\n",
    "long number": "network_dim = " + "9" * 10_000,
    "long hex number": 'train_data_dir = "x"\nnetwork_dim = 0x' + "f" * 10_000,
    "long number in json": '{"training_method": "LORA", "lora_rank": ' + "9" * 6_000 + "}",
    "huge exponent": '{"training_method": "LORA", "lora_rank": 1e400, "resolution": "1e999"}',
    "nan": '{"training_method": "LORA", "lora_alpha": NaN, "concepts": [{"path": "x"}]}',
    "long base 60": "config: {process: [{train: {steps: 1" + ":1" * 2_000 + "}}]}",
    "bad date": "config: {process: [{train: {steps: 2024-99-99}}]}",
    "strange keys": "config: {process: [{null: 1, 2: 3, 2024-01-01: 4, [a]: 5}]}",
    "long key": '{"training_method": "LORA", "' + "k" * 100_000 + '": 1}',
    "many": "seed = 1\n" + "".join(f"a{i} = {{b = 1}}\n" for i in range(10_000)),
    "wrong shapes": json.dumps({name: {"x": [{"y": [[1]]}]} for name in ONE_TRAINER} | {"model_type": [1]}),
    "wrong shapes too": json.dumps({name: [[1], {"z": None}] for name in ONE_TRAINER}),
    "wrong concepts": '{"training_method": "LORA", "concepts": {"a": 1, "0": [[]]}, "concept_file_name": "/dev/zero"}',
    "wrong toolkit": "config: {process: [3, [], {network: 5, train: [1], datasets: {a: b}, sample: x}]}",
    "surrogate": '{"training_method": "LORA", "concepts": [{"path": "\\ud800"}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_message(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(InweaveError) as caught:
        import_config(write_text(tmp_path, HOSTILE[name]))
    assert len(str(caught.value)) < 20_000
    assert time.monotonic() - began < 5


def test_one_trainer_of_long_ago(tmp_path: Path) -> None:
    old = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "x", "optimizer": "ADAMW",
           "learning_rate": 0.0003, "unet_learning_rate": 0.0001, "text_encoder_learning_rate": 0.0002,
           "train_text_encoder": True, "text_encoder_layer_skip": 1, "concepts": [{"path": "x"}], "weight_decay": 0.02,
           "timestep_distribution": "LOGIT_NORMAL", "gradient_checkpointing": "CPU_OFFLOADED", "text_caching": True,
           "save_after": 0, "save_after_unit": "NEVER", "train_text_encoder_epochs": 30}  # fmt: skip
    with pytest.raises(ConfigError, match="'LOGIT_NORMAL' has no equivalent"):
        import_config(write_text(tmp_path, json.dumps(old)))
    result = import_config(write_text(tmp_path, json.dumps({**old, "timestep_distribution": "UNIFORM"})))
    c = result.config
    assert (c.learning_rate, c.text_encoder_learning_rate, c.train_text_encoders, c.cache_text) == (
        1e-4,
        2e-4,
        True,
        False,
    )
    assert (c.clip_skip, c.weight_decay, c.gradient_checkpointing, c.save_every) == (2, 0.02, "full", 0)
    assert result.no_equivalent == ["text_encoder.stop_training_after: 30 epochs: components are trained to the end"]


@pytest.mark.parametrize("data", [b"\x80\x04\x95", b"\xff" * 100, b"a = 1\0", bytes(range(256)), b"x" * (2**20 + 1)])
def test_files_that_are_no_text_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    with pytest.raises(FormatError, match=r"run\.toml"):
        import_config(tmp_path / "run.toml")


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), "a\0b"):
        with pytest.raises(ConfigError):
            import_config(path)


WEIRD = [
    10**5000,
    -1,
    1e308,
    "x" * 5000,
    "",
    True,
    [[[]]],
    {"a": {"b": 1}},
    [None, {"c": 10**5000}],
    "\ud800",
    "1e9999",
    [],
]


WHOLE: dict[str, dict[str, Any]] = {
    "kohya": {"train_data_dir": "x", "network_dim": 4},
    "kohya_ss": {"LoRA_type": "Standard", "train_data_dir": "x", "network_dim": 4},
    "OneTrainer": {"training_method": "LORA", "concepts.0.path": "x"},
    "ai-toolkit": {"network.type": "lora", "datasets.0.folder_path": "x"},
    "SimpleTuner": {"model_family": "flux", "model_type": "lora", "data_backend_config": [{"instance_data_dir": "x"}]},
}
DIALECTS = {
    "kohya": KOHYA_DIALECT, "kohya_ss": KOHYA_DIALECT, "OneTrainer": ONE_TRAINER_DIALECT, "ai-toolkit": TOOLKIT_DIALECT,
    "SimpleTuner": TUNER_DIALECT,
}  # fmt: skip


@pytest.mark.parametrize("kind", DIALECTS)
@pytest.mark.parametrize("index", range(len(WEIRD)))
def test_weird_values_never_end_in_a_traceback(
    kind: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting in its turn, and all at once; parsing is passed over, for no file could hold some of these."""
    import inweave.training.config.importers.detect as importing

    names = [name.replace("*", "x") for name in (*DIALECTS[kind].plain, *DIALECTS[kind].readers)]
    for chosen in (*([name] for name in [*names, "model_type"]), names):
        settings = {**WHOLE[kind], **dict.fromkeys(chosen, WEIRD[index])}
        monkeypatch.setattr(importing, "_recognize", lambda table, settings=settings: (kind, settings))
        try:
            import_table({}, tmp_path / "x")
        except InweaveError as error:
            assert len(str(error)) < 50_000


@pytest.mark.parametrize("kind", WHOLE)
def test_what_every_weird_value_is_put_into_can_be_imported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inweave.training.config.importers.detect as importing

    options = {"optimizer": "adamw", "lr_scheduler": "constant"} if kind == "SimpleTuner" else {}
    monkeypatch.setattr(importing, "_recognize", lambda table: (kind, {**WHOLE[kind], **options}))
    overrides = {} if kind != "OneTrainer" else {"train_text_encoders": True}
    assert import_table({}, tmp_path / "x", **overrides).config.rank in (4, 8, 16)


@pytest.mark.parametrize(
    "text", [KOHYA, AI_TOOLKIT, json.dumps(ONE_TRAINER)], ids=["kohya", "ai-toolkit", "OneTrainer"]
)
def test_truncated_and_damaged_files_never_end_in_a_traceback(text: str, tmp_path: Path) -> None:
    for at in range(0, len(text), max(1, len(text) // 40)):
        for damaged in (text[:at], text[:at] + "\x01[{=" + text[at + 3 :]):
            try:
                import_config(write_text(tmp_path, damaged))
            except InweaveError as error:
                assert str(error)


MERGES = "a0: &a0 {b: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: 1}}\n" for n in range(1, 12)
)
BOMBS = {
    "merge keys.yaml": MERGES,
    "merge keys of ai-toolkit.yaml": f"config: {{process: [{{}}]}}\n{MERGES}",
    "one merge key of many.yaml": "a: &a {" + ", ".join(f"k{n}: 1" for n in range(500)) + "}\nb: {<<: [" + "*a, " * 5000 + "*a]}",
    "aliases.yaml": "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "circle.yaml": "config: &c {process: [*c]}",
    "merged circle.yaml": "rank: 3\na: &a {<<: *a}",
    "not a mapping.yaml": "a: {<<: [1, 2]}",
    "dashes.yaml": "- " * 20_000,
    "sexagesimal.yaml": "rank: " + "1:" * 10_000 + "1",
    "hex.yaml": "rank: 0x" + "f" * 5000,
    "digits.yaml": "rank: 1" + "0" * 5000,
    "surrogate.yaml": 'rank: "\\ud800"',
    "surrogate.json": '{"rank": "\\ud800"}',
    "digits.json": '{"rank": 1' + "0" * 5000 + "}",
    "nested.json": '{"rank": ' + "[" * 100_000,
    "nested a little less.json": '{"training_method": "LORA", "a": ' + "[" * 500 + "]" * 500 + "}",
    "dots.toml": "rank" + ".a" * 20_000 + " = 1",
    "many dots.toml": "\n".join(f"k{n}" + ".a" * 500 + " = 1" for n in range(200)),
    "fewer dots.toml": "rank" + ".a" * 500 + " = 1",
    "hex.toml": "rank = 0x" + "f" * 100_000,
    "nested.toml": "rank = " + "[" * 50_000,
    "large.toml": "a = 1\n" * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_an_error_of_ours_within_a_second(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(BOMBS[name])
    started = time.process_time()
    with pytest.raises((ConfigError, FormatError)) as raised:
        import_config(file)
    assert time.process_time() - started < 2 and len(str(raised.value)) < 5000
    if name.endswith(".toml"):
        with pytest.raises((ConfigError, FormatError)):
            TrainConfig.load(file)


def test_merge_keys_mean_what_yaml_says() -> None:
    yaml = pytest.importorskip("yaml")
    from inweave.training.config.importers.yaml_loader import BoundedLoader

    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz: &z {<<: [*x, *y], c: 5}\nw: {d: 1, <<: *z, a: 7}\n=: 1\n"
    assert yaml.load(text, BoundedLoader) == yaml.safe_load(text)


def test_the_concepts_of_onetrainer_are_read_from_below_its_folder_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('[{"path": "/home/somebody/photos", "enabled": true}]')
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    settings = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x"}
    for name in (str(secret), "../../../secret.json", "link.json"):
        if name == "link.json":
            (folder / name).symlink_to(secret)
        (folder / "config.json").write_text(json.dumps({**settings, "concept_file_name": name}))
        with pytest.raises(ConfigError, match="dataset: is required"):
            import_config(folder / "config.json")
