"""kohya's own files and commands: sections, variables, timesteps and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import import_config, import_text
from tests.unit.training.importers.small_imports import SHELL


def test_sections_may_repeat_a_key_and_off_is_not_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text(
        'train_data_dir = "x"\nnetwork_dim = 8\n[a]\nresume = false\ncolor_aug = false\nzero_terminal_snr = '
        "false\ndim_from_weights = false\n"
        'lr_scheduler_type = ""\nseed = 1\n[b]\nseed = 2\nresume_from_huggingface = false\ntoken_warmup_min '
        "= 1\ntoken_warmup_step = 0\n"
    )
    result = import_config(path)
    assert (result.config.seed, result.config.resume, result.no_equivalent) == (2, "never", [])
    assert any("seed: is set twice" in note for note in result.notes)


def test_a_dataset_file_may_switch_off_what_is_not_supported(tmp_path: Path) -> None:
    from inweave.training.data.reader import read_dataset

    (tmp_path / "set.toml").write_text(
        "[general]\ncolor_aug = false\ntoken_warmup_step = 0\n[[datasets]]\n[[datasets.subsets]]\nimage_dir "
        '= "none"\ncolor_aug = true\n'
    )
    with pytest.raises(ConfigError) as caught:
        read_dataset(tmp_path / "set.toml")
    problems = str(caught.value)
    assert "subsets[0].color_aug: True is not supported" in problems and "general" not in problems


def test_a_command_with_variables_comments_and_continuations() -> None:
    text = r"""#!/bin/bash
    # a run
    export MODEL="/models/sd xl.safetensors"  # the base
    RANK=16
    accelerate launch --num_cpu_threads_per_process=8 --mixed_precision bf16 \
      sd-scripts/sdxl_train_network.py --pretrained_model_name_or_path="${MODEL}" \
      # not the launcher's
      --mixed_precision=fp16 --network_module lycoris.kohya --network_dim $RANK \
      --network_args "algo=lokr" "factor=8" preset=attn-mlp --max_train_epoch 12 --unet_lr 2e-4 \
      --optimizer_type="AdamW8bit" --optimizer_args weight_decay=0.1 betas=0.9,0.99 \
      --train_data_dir 'my images' --reg_data_dir=reg --resolution=1024,1024 --cache_latents --network_train_unet_only
    """
    c = import_text(text, "train.sh").config
    assert (c.model, c.precision, c.network, c.rank, c.lokr_factor) == (
        "/models/sd xl.safetensors",
        "fp16",
        "lokr",
        16,
        8,
    )
    assert (c.epochs, c.learning_rate, c.weight_decay, c.betas, c.train_text_encoders) == (
        12,
        2e-4,
        0.1,
        (0.9, 0.99),
        False,
    )
    assert isinstance(c.dataset, dict)
    subsets = c.dataset["datasets"][0]["subsets"]
    assert [(each["image_dir"], each.get("is_reg", False)) for each in subsets] == [
        ("my images", False),
        ("reg", True),
    ]
    windows = (
        "set OUT=D:\\out\naccelerate launch ^\n  E:\\sd\\train_network.py ^\n --output_dir=%OUT% ^\n "
        "--network_module=networks.lora --lr 1e-4"
    )
    assert import_text(windows, "a.bat", dataset="x").config.output == "D:\\out"
    power = (
        "$dim = 12\naccelerate launch train_network.py `\n  --network_dim=$dim `\n "
        "--network_module=networks.lora --lr 1e-4"
    )
    assert import_text(power, "a.ps1", dataset="x").config.rank == 12
    with pytest.raises(ConfigError, match="DreamBooth"):
        import_text("python train_db.py --train_data_dir x --output_dir y", "a.sh")
    with pytest.raises(ConfigError, match="a full fine-tune"):
        import_text("accelerate launch sdxl_train.py --train_data_dir x --output_dir y", "a.sh")
    with pytest.raises(ConfigError, match=r"\(Wan\) is a model that cannot be trained"):
        import_text("accelerate launch wan_train_network.py --dit x --network_module networks.lora_wan --vae y", "a.sh")


def test_a_command_may_take_its_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('network_module = "networks.lora"\nnetwork_dim = 8\nunet_lr = 1e-4\n')
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch train_network.py --config_file cfg/run.toml --network_dim 12 --train_data_dir x\n"
    )
    assert import_config(path).config.rank == 12
    (tmp_path / "run.toml").unlink()
    with pytest.raises(ConfigError, match="import that file instead"):
        import_config(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--timestep_sampling sigma --discrete_flow_shift 1", ("uniform", None, 1.0)),
        ("", ("uniform", 3.0, 1.0)),
        ("--timestep_sampling sigmoid --sigmoid_scale 1.5", ("sigmoid", None, 1.5)),
        ("--timestep_sampling shift --discrete_flow_shift 3.1582", ("shift", 3.1582, 1.0)),
        ("--timestep_sampling flux_shift", ("shift", None, 1.0)),
        ("--timestep_sampling sigma --weighting_scheme logit_normal --discrete_flow_shift 2", ("shift", 2.0, 1.0)),
    ],
)
def test_times_of_flux(options: str, expected: tuple[Any, ...]) -> None:
    line = (
        "accelerate launch flux_train_network.py --network_module networks.lora_flux --model_prediction_type "
        f"raw {options}"
    )
    c = import_text(line, "a.sh", dataset="x").config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std) == expected
    assert (c.objective, c.guidance, c.min_snr_gamma) == ("flow", 3.5, None)
    with pytest.raises(
        ConfigError, match=r"'sigma_scaled' compares noisy - sigma \* v, .*kohya's default, which the file does not"
    ):
        import_text(line.replace("--model_prediction_type raw", ""), "a.sh")
    c = import_text(
        f"{line} --timestep_sampling sigma --weighting_scheme logit_normal --logit_mean 0.5", "a.sh", dataset="x"
    ).config
    assert (c.timestep_sampling, c.logit_mean) == ("logit_normal", -0.5), "a place in the schedule: 0 is pure noise"


@pytest.mark.parametrize(("scheme", "weighting"), [("logit_normal", 2.0), ("uniform", 2.0), ("sigma_sqrt", 0.0)])
def test_the_loss_of_sd3_is_that_of_images(scheme: str, weighting: float) -> None:
    line = (
        "accelerate launch sd3_train_network.py --network_module networks.lora_sd3 --training_shift 3 "
        "--weighting_scheme "
    )
    result = import_text(line + scheme, "a.sh", dataset="x")
    assert (result.config.sigma_weighting, result.config.timestep_shift) == (weighting, 3.0)
    assert not any(each.startswith("weighting_scheme") for each in result.no_equivalent)
    with pytest.raises(ConfigError, match="'cosmap' with a shift of 3 has no equivalent"):
        import_text(f"{line}cosmap", "a.sh", dataset="x")


@pytest.mark.parametrize("version", ["edit", "layered"])
def test_variants_of_qwen_image_that_take_images_are_refused(version: str) -> None:
    line = "python qwen_image_train_network.py --network_module networks.lora_qwen_image --dit a --model_version "
    with pytest.raises(ConfigError, match=f"model_version: '{version}' is a variant of Qwen-Image"):
        import_text(line + version, "a.sh", dataset="x")
    assert import_text(f"{line}original", "a.sh", dataset="x").config.model == "a"


def test_a_whole_name_is_not_the_start_of_another() -> None:
    """keep_tokens is a setting of its own, and not keep_tokens_separator in short."""
    c = import_text(f"{SHELL} --train_data_dir x --keep_tokens 2 --shuffle", "a.sh").config
    assert (c.keep_tokens, c.shuffle_tags, c.dataset) == (2, True, "x")
