"""Files of kohya_ss: the vocabulary of its GUI, and what is refused, for one reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from tests.unit.training.importers.small_imports import GUI, gui, imported, refusal


def test_the_vocabulary_of_the_gui(tmp_path: Path) -> None:
    c = gui(tmp_path)
    assert (c.rank, c.alpha, c.network, c.epochs, c.steps, c.warmup) == (32, 16, "lora", 3, None, 0.1)
    assert (c.optimizer, c.resolution, c.min_snr_gamma, c.resume, c.clip_skip) == (
        "adamw8bit",
        1024,
        None,
        "never",
        None,
    )
    assert (c.learning_rate, c.text_encoder_learning_rate, c.model) == (
        1e-4,
        5e-5,
        "stabilityai/stable-diffusion-xl-base-1.0",
    )
    assert gui(tmp_path, max_train_steps="900").steps == 900
    assert (gui(tmp_path, max_train_steps=900, max_train_epochs="7").epochs) == 7
    assert gui(tmp_path, optimizer="adamw", optimizer_type="AdamW8bit").optimizer == "adamw8bit"
    assert gui(tmp_path, optimizer="PRODIGY", optimizer_args='"d_coef=2" "weight_decay=0.4"').optimizer_args == {
        "d_coef": 2
    }
    assert gui(tmp_path, additional_parameters="--max_grad_norm=0 --min_snr_gamma 5").max_grad_norm == 0
    assert gui(tmp_path, caption_extension="").caption_extensions == (".caption",)
    only = gui(tmp_path, text_encoder_lr=0)
    assert (only.train_text_encoders, only.train_denoiser) == (False, True)
    both = gui(tmp_path, text_encoder_lr=0, unet_lr="0")
    assert (both.train_text_encoders, both.learning_rate, both.text_encoder_learning_rate) == (True, 1e-4, 1e-4)
    texts = gui(tmp_path, unet_lr=0)
    assert (texts.train_denoiser, texts.text_encoder_learning_rate) == (False, 5e-5)
    assert gui(tmp_path, noise_offset=0.05).noise_offset == 0.05
    assert gui(tmp_path, noise_offset=0.05, noise_offset_type="Multires").noise_offset == 0
    robust = gui(tmp_path, loss_type="huber", scale_weight_norms=1.5, min_timestep=100, noise_offset_type="Multires",
                 multires_noise_iterations=6, multires_noise_discount=0.2, save_every_n_epochs=2,
                 debiased_estimation_loss=True)  # fmt: skip
    assert (robust.loss, robust.huber_c, robust.huber_schedule) == (
        "huber",
        0.1,
        "snr",
    )  # the script's schedule, not ours
    assert (robust.scale_weight_norms, robust.min_timestep, robust.max_timestep) == (1.5, 100, None)
    assert (robust.multires_noise_iterations, robust.multires_noise_discount) == (6, 0.2)
    assert (robust.save_every_epochs, robust.debiased_estimation) == (2, True)
    assert "keep_last" not in robust.model_fields_set  # every adapter is kept
    lokr = gui(tmp_path, LoRA_type="LyCORIS/LoKr", factor=6, network_dim=100000, conv_dim=100000)
    assert (lokr.network, lokr.lokr_factor, lokr.rank, lokr.conv_rank) == ("lokr", 6, 100000, 100000)
    adafactor = gui(tmp_path, optimizer="Adafactor", optimizer_args="scale_parameter=False relative_step=False")
    assert (adafactor.optimizer, adafactor.optimizer_args, adafactor.weight_decay) == (
        "adafactor",
        {"scale_parameter": False},
        0,
    )


def test_old_files_of_the_gui_hold_text_and_name_no_type(tmp_path: Path) -> None:
    old = {"max_resolution": "512,512", "learning_rate": "0.0001", "lr_warmup": "0", "epoch": "2", "network_dim": 8,
           "use_8bit_adam": True, "unet_lr": "0.0001", "text_encoder_lr": "5e-5", "seed": "12", "keep_tokens": "1",
           "bucket_reso_steps": 64.0, "gradient_accumulation_steps": 1.0,
           "lr_scheduler_num_cycles": "", "xformers": True}  # fmt: skip
    c = imported(tmp_path, old).config
    assert (c.epochs, c.seed, c.keep_tokens, c.optimizer, c.text_encoder_learning_rate) == (2, 12, 1, "adamw8bit", 5e-5)
    assert (c.alpha, c.lr_scheduler, c.buckets, c.precision) == (1, "cosine", True, "fp16")  # the GUI's own defaults


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"LoRA_type": "LyCORIS/iA3"}, "'ia3' is not supported"),
        ({"LoRA_type": "LyCORIS/Diag-OFT"}, "'diag-oft' is not supported"),
        ({"LoRA_type": "LyCORIS/Native Fine-Tuning"}, "trains the whole model"),
        ({"LoRA_type": "LoRA-FA"}, "'networks.lora_fa' is not supported"),
        ({"weighted_captions": True}, "weighted_captions: True"),
        ({"color_aug": True}, "color_aug: True"),
        (
            {"LoRA_type": "LyCORIS/LoCon", "rank_dropout": 0.1, "bypass_mode": True},
            "network_args.rank_dropout: '0.1': only that of networks.lora, and of LyCORIS without bypass_mode",
        ),
        ({"LoRA_type": "LyCORIS/LoCon", "dora_wd": True, "bypass_mode": True}, "leaves the magnitudes of dora_wd out"),
        ({"LoRA_type": "LyCORIS/LoKr", "rank_dropout": 0.1, "rank_dropout_scale": True}, "rank_dropout_scale: 'True'"),
        ({"LoRA_type": "Kohya LoKr", "rank_dropout": 0.1}, "network_args.rank_dropout: '0.1': only that of"),
        ({"dim_from_weights": True}, "dim_from_weights: names no adapter; set start_from to one"),
        (
            {"optimizer": "Adafactor", "optimizer_args": "relative_step=False", "lr_scheduler": "adafactor"},
            "lr_scheduler: 'adafactor'",
        ),
        (
            {"LoRA_type": "LyCORIS/LoCon", "network_dropout": 0.1},
            "network_dropout: 0.1: LyCORIS drops the adapter's outputs",
        ),
        (
            {"LoRA_type": "LyCORIS/LoHa", "network_dropout": 0.1},
            "network_dropout: 0.1: LyCORIS drops the adapter's outputs",
        ),
        ({"optimizer": "AdEMAMix8bit"}, "'AdEMAMix8bit' is not supported"),
        ({"additional_parameters": "--lr_scheduler_type mine.Curve"}, "lr_scheduler_type: 'mine.Curve'"),
    ],
)
def test_what_cannot_be_trained_is_one_reason(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gui(tmp_path, **changes)
    assert reason in refusal(caught)


def test_dropout_between_two_factors_is_imported(tmp_path: Path) -> None:
    c = gui(tmp_path, network_dropout=0.1, rank_dropout=0.2, module_dropout=0.3)
    assert (c.network, c.dropout, c.hidden_dropout, c.rank_dropout) == ("lora", 0, 0.1, 0.2)
    assert c.module_dropout == gui(tmp_path, LoRA_type="LyCORIS/LoCon", module_dropout=0.3).module_dropout == 0.3
    c = gui(tmp_path, LoRA_type="LyCORIS/LoHa", rank_dropout=0.2, module_dropout=0.3)
    assert (c.network, c.rank_dropout, c.module_dropout) == ("loha", 0.2, 0.3)
    table = {**GUI, "LoRA_type": "LyCORIS/LoCon", "network_dropout": 0.1}
    c = imported(tmp_path, table, dropout=0.1).config
    assert (c.dropout, c.hidden_dropout) == (0.1, 0)


FLUX = {
    "LoRA_type": "Flux1", "sdxl": False, "flux1_checkbox": True, "model_prediction_type": "raw",
    "timestep_sampling": "sigmoid", "text_encoder_lr": 0,
}  # fmt: skip


def test_boxes_of_flux_are_options_of_its_network(tmp_path: Path) -> None:
    c = gui(tmp_path, **FLUX, rank_dropout=0.1, module_dropout=0.2, train_double_block_indices="all", in_dims="")
    assert (c.network, c.rank_dropout, c.module_dropout) == ("lora", 0.1, 0.2)
    for name, value in (("img_attn_dim", "4"), ("train_lora_ggpo", True)):
        with pytest.raises(ConfigError, match=f"network_args.{name}: '{value}': is not supported"):
            gui(tmp_path, **FLUX, **{name: value})


@pytest.mark.parametrize(
    ("double", "single", "trained", "untrained"),
    [
        (
            "0-2,5",
            "all",
            ("transformer_blocks.5.ff", "single_transformer_blocks.9.proj_mlp"),
            "transformer_blocks.3.ff",
        ),
        ("all", "none", ("transformer_blocks.3.ff",), "single_transformer_blocks.0.proj_mlp"),
        ("0", "all", ("transformer_blocks.0.ff", "single_transformer_blocks.1.proj_mlp"), "transformer_blocks.1.ff"),
        (
            "",
            "7",
            ("transformer_blocks.1.ff", "single_transformer_blocks.7.x"),
            "single_transformer_blocks.17.proj_mlp",
        ),
    ],
)
def test_blocks_of_flux_by_number(
    double: str, single: str, trained: tuple[str, ...], untrained: str, tmp_path: Path
) -> None:
    """Zero and none mean something here: a block, and no block at all."""
    c = gui(tmp_path, **FLUX, train_double_block_indices=double, train_single_block_indices=single)
    target = c.targets[0]
    assert all(re.fullmatch(target, name) for name in trained) and not re.fullmatch(target, untrained)
    with pytest.raises(ConfigError, match="train_double_block_indices: expected all, none or numbers"):
        gui(tmp_path, **FLUX, train_double_block_indices="5-2")


def test_loha_and_lokr_of_kohya_itself(tmp_path: Path) -> None:
    c = gui(tmp_path, LoRA_type="Kohya LoHa", conv_dim=4, conv_alpha=1)
    assert (c.network, c.rank, c.conv_rank, c.conv_alpha) == ("loha", 32, 4, 1)
    c = gui(tmp_path, LoRA_type="Kohya LoKr", conv_dim=0, factor=4)
    assert (c.network, c.lokr_factor, c.conv_rank) == ("lokr", 4, None)
    assert "resnets" not in str(c.targets)


def test_options_of_lycoris_are_imported(tmp_path: Path) -> None:
    for boxes, network in (({}, "locon"), ({"dora_wd": True}, "dora")):
        c = gui(tmp_path, LoRA_type="LyCORIS/LoCon", rank_dropout=0.2, rank_dropout_scale=False, **boxes)
        assert (c.network, c.rank_dropout, c.output_dropout) == (network, 0, 0.2)
    result = imported(tmp_path, {**GUI, "LoRA_type": "LyCORIS/LoCon", "dora_wd": True})
    assert any("trains through the norm" in line for line in result.no_equivalent)
    c = gui(tmp_path, LoRA_type="LyCORIS/LoKr", decompose_both=True, rank_dropout_scale=True, use_cp=True)
    assert (c.network, c.lokr_decompose_both, c.tucker) == ("lokr", True, True)
    c = gui(tmp_path, LoRA_type="LyCORIS/LoKr", rank_dropout=0.2, bypass_mode=True)
    assert c.rank_dropout == c.output_dropout == 0


def test_an_adapter_is_trained_further_at_its_own_ranks(tmp_path: Path) -> None:
    c = gui(tmp_path, dim_from_weights=True, lora_network_weights="mine.safetensors")
    assert c.start_from == "mine.safetensors"


def test_adafactor_that_chooses_its_rate_has_no_schedule(tmp_path: Path) -> None:
    c = gui(tmp_path, optimizer="Adafactor", optimizer_args="", lr_scheduler="adafactor")
    assert (c.optimizer, c.lr_scheduler, c.learning_rate, c.warmup) == ("adafactor", "constant", 0.01, 0)


def test_a_refused_setting_can_be_left_out_or_replaced(tmp_path: Path) -> None:
    table = {**GUI, "weighted_captions": True, "optimizer": "AdEMAMix8bit"}
    with pytest.raises(
        ConfigError, match=r"--set optimizer=.* to choose another; --without weighted_captions to import the rest"
    ):
        imported(tmp_path, table)
    result = imported(tmp_path, table, without=["weighted_captions"], optimizer="adamw")
    assert result.config.optimizer == "adamw" and result.no_equivalent[0].startswith("weighted_captions: left out")
    with pytest.raises(ConfigError, match="AdEMAMix8bit"):
        imported(tmp_path, table, without=["weighted_captions", "optimizer_type"])  # another one has to be chosen


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"max_resolution": "512,512", "lr_warmup": 0, "learning_rate": 1e-6}, "DreamBooth trains the whole model"),
        ({"max_resolution": "512,512", "lr_warmup": 0, "token_string": "x", "init_word": "*"}, "an embedding"),
        ({"max_resolution": "512,512", "lr_warmup": 0, "train_dir": "x", "learning_rate_te": 0}, "a full fine-tune"),
        ({"train_data_dir": "x", "max_train_steps": 10, "learning_rate": 1e-6}, "network_module: is not set"),
        (
            {"network_module": "lycoris.kohya", "network_args": ["algo=full"], "train_data_dir": "x"},
            "a fine-tune of the whole",
        ),
        ({"network_module": "networks.lora_lumina", "train_data_dir": "x"}, "Lumina"),
        (
            {"leco_denoise_guidance_scale": 1.0, "network_dim": 4, "network_module": "networks.lora"},
            "LECO trains from prompts",
        ),
        ({"model_train_type": "sdxl-finetune", "train_data_dir": "x", "network_dim": 1}, "trains no adapter"),
        ({"training_method": "EMBEDDING", "model_type": "STABLE_DIFFUSION_15"}, "an embedding"),
        (
            {"training_method": "LORA", "model_type": "HUNYUAN_VIDEO"},
            "'HUNYUAN_VIDEO' (HunyuanVideo) is a model that cannot be trained here",
        ),
        ({"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15_INPAINTING"}, "cannot be trained here"),
        (
            {"model_family": "ltxvideo", "model_type": "lora"},
            "'ltxvideo' (LTX-Video) is a model that cannot be trained",
        ),
        ({"model_family": "flux", "model_type": "full"}, "a full fine-tune"),
        ({"model_family": "flux", "model_type": "lora", "controlnet": True}, "a ControlNet"),
        ({"plugin_unet": {"a": {"lr": 1}}}, "HCP-Diffusion"),
    ],
)
def test_other_methods_and_models_are_refused_by_name(table: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, table)
    assert reason in refusal(caught)


def test_noise_and_optimizers_that_kohya_adds_to(tmp_path: Path) -> None:
    noise = {"noise_offset": 0.05, "adaptive_noise_scale": 0.01, "noise_offset_random_strength": True}
    more = {"ip_noise_gamma": 0.1, "ip_noise_gamma_random_strength": True}
    c = gui(tmp_path, **noise, **more)
    assert (c.noise_offset, c.adaptive_noise_scale, c.noise_offset_random) == (0.05, 0.01, True)
    assert (c.input_perturbation, c.input_perturbation_random) == (0.1, True)
    assert (c.mask_average, c.epoch_steps) == ("image", "whole")
    c = gui(
        tmp_path, optimizer="Adafactor", optimizer_args="scale_parameter=True relative_step=True", lr_scheduler="cosine"
    )
    assert (c.learning_rate, c.text_encoder_learning_rate, c.lr_scheduler, c.warmup) == (0.01, None, "constant", 0)
    with pytest.raises(ConfigError, match="warmup_init"):
        gui(tmp_path, optimizer="Adafactor", optimizer_args="warmup_init=True")
