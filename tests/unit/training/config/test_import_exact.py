"""An import trains what the other trainer would: its modules, its defaults, its vocabulary; or it is refused for one reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.fields import setting_facts
from inweave.training.config.importers.defaults import defaults, trainers
from inweave.training.config.importers.detect import Imported, import_config, import_text
from inweave.training.config.schema import TrainConfig

GUI: dict[str, Any] = {
    "LoRA_type": "Standard", "adaptive_noise_scale": 0, "additional_parameters": "", "block_dims": "", "caption_extension": ".txt",
    "clip_skip": "1", "color_aug": False, "conv_dim": 8, "conv_alpha": 4, "epoch": 3, "learning_rate": 1e-4, "lr_scheduler": "cosine",
    "lr_warmup": 10, "max_resolution": "1024,1024", "max_timestep": 1000, "max_token_length": "75", "max_train_epochs": "",
    "max_train_steps": "", "min_snr_gamma": 0, "mixed_precision": "bf16", "module_dropout": 0, "multires_noise_iterations": 0,
    "network_alpha": 16, "network_dim": 32, "noise_offset": 0, "noise_offset_type": "Original", "optimizer": "AdamW8bit",
    "optimizer_args": "", "resume": "", "sdxl": True, "sdxl_cache_text_encoder_outputs": False, "sdxl_no_half_vae": True,
    "seed": "", "stop_text_encoder_training_pct": 0, "text_encoder_lr": 5e-5, "unet_lr": 1e-4, "train_batch_size": 2, "up_lr_weight": "",
    "weighted_captions": False, "xformers": "xformers", "v2": False, "save_every_n_epochs": 0, "scale_weight_norms": 0,
}  # fmt: skip
TOOLKIT: dict[str, Any] = {
    "type": "sd_trainer", "network": {"type": "lora", "linear": 16, "linear_alpha": 16}, "datasets": [{"folder_path": "x"}],
    "train": {"steps": 20, "noise_scheduler": "flowmatch", "lr": 1e-4, "dtype": "bf16", "optimizer": "adamw8bit"},
    "model": {"name_or_path": "m", "arch": "flux"},
}  # fmt: skip
ONE: dict[str, Any] = {
    "training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x", "text_encoder": {"train": False},
    "text_encoder_2": {"train": False},
}  # fmt: skip
TUNER: dict[str, Any] = {
    "model_family": "sdxl", "model_type": "lora", "optimizer": "adamw_bf16", "lr_scheduler": "constant", "max_train_steps": 9,
}  # fmt: skip
SHELL = "accelerate launch train_network.py --network_module networks.lora --resolution 512 --pretrained_model_name_or_path m"


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
    return problem


# --- defaults -------------------------------------------------------------------------------------------------------


def test_every_trainer_has_a_table_of_defaults_with_its_version() -> None:
    assert trainers().keys() == {"kohya", "kohya_ss", "onetrainer", "ai_toolkit", "simpletuner", "diffusers", "models"}
    assert all(len(version) > 10 for version in trainers().values())
    kohya = defaults("kohya", "values")
    assert (kohya["network_dim"], kohya["network_alpha"], kohya["learning_rate"], kohya["max_train_steps"]) == (
        4,
        1,
        2e-6,
        1600,
    )
    assert (kohya["caption_extension"], kohya["mixed_precision"], kohya["enable_bucket"]) == (".caption", "no", False)
    assert defaults("kohya", "flow", "flux")["discrete_flow_shift"] == 3.0
    one = defaults("onetrainer", "values")
    assert (one["lora_rank"], one["lora_alpha"], one["epochs"], one["learning_rate"]) == (16, 1.0, 100, 3e-6)
    assert (one["train_dtype"], one["learning_rate_warmup_steps"], one["layer_filter_preset"]) == (
        "FLOAT_16",
        200,
        "full",
    )
    toolkit = defaults("ai_toolkit", "values", "optimizer")
    assert (toolkit["train.steps"], toolkit["train.lr"], toolkit["train.dtype"], toolkit["eps"]) == (
        1000,
        1e-6,
        "fp32",
        1e-6,
    )
    tuner = defaults("simpletuner", "values")
    assert (tuner["model_type"], tuner["lora_dropout"], tuner["max_grad_norm"], tuner["lr_warmup_steps"]) == (
        "full",
        0.1,
        2.0,
        500,
    )


@pytest.mark.parametrize(
    ("kind", "family"), [("gui", "sdxl"), ("one", "sdxl"), ("toolkit", "flux"), ("tuner", "sdxl"), ("shell", "sd")]
)
def test_no_preset_of_ours_changes_an_import(kind: str, family: str, tmp_path: Path) -> None:
    """SDXL's preset alone would add min-SNR, a noise offset and other targets."""
    results = {
        "gui": lambda: imported(tmp_path, GUI), "one": lambda: imported(tmp_path, ONE), "toolkit": lambda: toolkit(tmp_path),
        "tuner": lambda: imported(tmp_path, TUNER), "shell": lambda: import_text(SHELL, "a command", dataset="x"),
    }  # fmt: skip
    config = results[kind]().config
    filled = config.with_preset(family)
    changed = {name for name in TrainConfig.model_fields if getattr(config, name) != getattr(filled, name)}
    assert changed <= {"resolution"}  # a dataset file, or SimpleTuner's, says it
    assert (config.min_snr_gamma, config.noise_offset) == (None, 0.0)
    written = {
        name for name in TrainConfig.model_fields if setting_facts(name)["group"] in ("Adapter", "Optimization", "Loss")
    }
    open_settings = {"start_from", "seed", "steps", "epochs", "conv_rank", "conv_alpha"}
    assert written - open_settings <= config.model_fields_set
    again = tmp_path / "ours.toml"
    again.write_text(config.to_toml(), "utf-8")
    assert TrainConfig.load(again) == config


# --- modules: what the other trainers adapt -----------------------------------------------------------------------


def module_names(network: Any, config: TrainConfig) -> set[str]:
    from inweave.training.adapters.targets import select_modules

    return {name.replace(".", "_") for name in select_modules("unet", network, config)}


@pytest.mark.parametrize("preset", ["full", "attn-mlp", "full-lin", "unet-only"])
def test_the_modules_are_those_of_lycoris(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    kohya = pytest.importorskip("lycoris.kohya")
    from diffusers import UNet2DConditionModel

    table = kohya.PRESET[preset]  # without a class of Anima, whose name a UNet's time embedding has too
    classes = [each for each in table["unet_target_module"] if each != "TimestepEmbedding"]
    monkeypatch.setitem(kohya.PRESET, preset, {**table, "unet_target_module": classes})

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, layers_per_block=1, norm_num_groups=8,
        attention_head_dim=4,
    )  # fmt: skip
    theirs = kohya.create_network(1.0, 4, 1.0, None, torch.nn.Module(), unet, algo="loha", preset=preset, conv_dim=4)
    expected = {each.lora_name.removeprefix("lora_unet_") for each in theirs.unet_loras}
    ours = gui(tmp_path, LoRA_type="LyCORIS/LoHa", LyCORIS_preset=preset, sdxl=False, max_resolution="512,512")
    assert module_names(unet, ours) == expected and len(expected) > 20
    assert ours.network == "loha" and ours.train_text_encoders is (preset not in ("unet-only",))


@pytest.mark.parametrize(
    ("kind", "sdxl", "count"), [("Standard", False, 192), ("Kohya LoCon", False, 278), ("Standard", True, 722)]
)
def test_kohya_adapts_as_many_modules(kind: str, sdxl: bool, count: int, tmp_path: Path) -> None:
    """The counts that its scripts print for SD 1.5 and SDXL; and block weights reach every one of them once."""
    torch = pytest.importorskip("torch")
    from diffusers import UNet2DConditionModel

    from inweave.training.adapters.targets import check_rules, first_rules, select_modules

    large: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
    }  # fmt: skip
    with torch.device("meta"):
        unet = UNet2DConditionModel(**(large if sdxl else {}))
    dims = ",".join(str(1 + index) for index in range(23 if sdxl else 25))
    config = gui(
        tmp_path, LoRA_type=kind, sdxl=sdxl, block_dims=dims, up_lr_weight="0,0.5" + ",1" * (7 if sdxl else 10)
    )
    names = [f"unet.{name}" for name in select_modules("unet", unet, config)]
    assert len(names) == count
    check_rules(config.rules, names)
    rules = first_rules(names, config.rules)
    if kind == "Standard":
        assert all(rules.values())
    first = rules["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"]
    assert first is not None and (first.rank, first.alpha, first.learning_rate) == (5, 16, None)
    up = "unet.up_blocks.0.attentions.1." if sdxl else "unet.up_blocks.1.attentions.0."
    later = rules[f"{up}proj_in"]
    assert later is not None and later.learning_rate == (5e-5 if sdxl else None)
    if sdxl:
        skipped = rules["unet.up_blocks.0.attentions.0.proj_in"]
        assert skipped is not None and skipped.skip


# --- kohya_ss -------------------------------------------------------------------------------------------------------


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
                 multires_noise_iterations=6, multires_noise_discount=0.2, save_every_n_epochs=2, debiased_estimation_loss=True)  # fmt: skip
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
    old = {"max_resolution": "512,512", "learning_rate": "0.0001", "lr_warmup": "0", "epoch": "2", "network_dim": 8, "use_8bit_adam": True,
           "unet_lr": "0.0001", "text_encoder_lr": "5e-5", "seed": "12", "keep_tokens": "1", "bucket_reso_steps": 64.0,
           "gradient_accumulation_steps": 1.0, "lr_scheduler_num_cycles": "", "xformers": True}  # fmt: skip
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
        ({"ip_noise_gamma": 0.1}, "ip_noise_gamma: 0.1"),
        ({"weighted_captions": True}, "weighted_captions: True"),
        ({"color_aug": True}, "color_aug: True"),
        ({"rank_dropout": 0.1}, "network_args.rank_dropout"),
        ({"optimizer": "AdEMAMix8bit"}, "'AdEMAMix8bit' is not supported"),
        ({"optimizer": "Adafactor"}, "relative_step=True chooses its own learning rate"),
        ({"additional_parameters": "--lr_scheduler_type CosineAnnealingLR"}, "lr_scheduler_type: 'CosineAnnealingLR'"),
    ],
)
def test_what_cannot_be_trained_is_one_reason(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gui(tmp_path, **changes)
    assert reason in refusal(caught)


def test_a_refused_setting_can_be_left_out_or_replaced(tmp_path: Path) -> None:
    table = {**GUI, "ip_noise_gamma": 0.1, "optimizer": "AdEMAMix8bit"}
    with pytest.raises(
        ConfigError, match=r"--set optimizer=.* to choose another; --without ip_noise_gamma to import the rest"
    ):
        imported(tmp_path, table)
    result = imported(tmp_path, table, without=["ip_noise_gamma"], optimizer="adamw")
    assert result.config.optimizer == "adamw" and result.no_equivalent[0].startswith("ip_noise_gamma: left out")
    with pytest.raises(ConfigError, match="AdEMAMix8bit"):
        imported(tmp_path, table, without=["ip_noise_gamma", "optimizer_type"])  # another one has to be chosen


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
            "'HUNYUAN_VIDEO' is a model that cannot be trained here",
        ),
        ({"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15_INPAINTING"}, "cannot be trained here"),
        ({"model_family": "ltxvideo", "model_type": "lora"}, "'ltxvideo' is a model that cannot be trained"),
        ({"model_family": "flux", "model_type": "full"}, "a full fine-tune"),
        ({"model_family": "flux", "model_type": "lora", "controlnet": True}, "a ControlNet"),
        ({"plugin_unet": {"a": {"lr": 1}}}, "HCP-Diffusion"),
    ],
)
def test_other_methods_and_models_are_refused_by_name(table: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, table)
    assert reason in refusal(caught)


# --- kohya's own files and commands --------------------------------------------------------------------------------


def test_sections_may_repeat_a_key_and_off_is_not_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text(
        'train_data_dir = "x"\nnetwork_dim = 8\n[a]\nresume = false\ncolor_aug = false\nzero_terminal_snr = false\ndim_from_weights = false\n'
        'lr_scheduler_type = ""\nseed = 1\n[b]\nseed = 2\nresume_from_huggingface = false\ntoken_warmup_min = 1\ntoken_warmup_step = 0\n'
    )
    result = import_config(path)
    assert (result.config.seed, result.config.resume, result.no_equivalent) == (2, "never", [])
    assert any("seed: is set twice" in note for note in result.notes)


def test_a_dataset_file_may_switch_off_what_is_not_supported(tmp_path: Path) -> None:
    from inweave.training.data.reader import read_dataset

    (tmp_path / "set.toml").write_text(
        '[general]\ncolor_aug = false\ntoken_warmup_step = 0\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "none"\ncolor_aug = true\n'
    )
    with pytest.raises(ConfigError) as caught:
        read_dataset(tmp_path / "set.toml")
    problems = "\n".join(caught.value.problems)
    assert "subsets[0].color_aug: True is not supported" in problems and "general" not in problems


def test_a_command_with_variables_comments_and_continuations() -> None:
    text = r"""#!/bin/bash
    # a run
    export MODEL="/models/sd xl.safetensors"  # the base
    RANK=16
    accelerate launch --num_cpu_threads_per_process=8 --mixed_precision bf16 \
      sd-scripts/sdxl_train_network.py --pretrained_model_name_or_path="${MODEL}" \
      # not the launcher's
      --mixed_precision=fp16 --network_module lycoris.kohya --network_dim $RANK --network_args "algo=lokr" "factor=8" preset=attn-mlp \
      --optimizer_type="AdamW8bit" --optimizer_args weight_decay=0.1 betas=0.9,0.99 --max_train_epoch 12 --unet_lr 2e-4 \
      --train_data_dir 'my pictures' --reg_data_dir=reg --resolution=1024,1024 --cache_latents --network_train_unet_only
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
        ("my pictures", False),
        ("reg", True),
    ]
    windows = "set OUT=D:\\out\naccelerate launch ^\n  E:\\sd\\train_network.py ^\n --output_dir=%OUT% ^\n --network_module=networks.lora --lr 1e-4"
    assert import_text(windows, "a.bat", dataset="x").config.output == "D:\\out"
    power = "$dim = 12\naccelerate launch train_network.py `\n  --network_dim=$dim `\n --network_module=networks.lora --lr 1e-4"
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
    line = f"accelerate launch flux_train_network.py --network_module networks.lora_flux --model_prediction_type raw {options}"
    c = import_text(line, "a.sh", dataset="x").config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std) == expected
    assert (c.objective, c.guidance, c.min_snr_gamma) == ("flow", 3.5, None)
    with pytest.raises(
        ConfigError, match=r"model_prediction_type: 'sigma_scaled': .*kohya's default, which the file does not"
    ):
        import_text(line.replace("--model_prediction_type raw", ""), "a.sh")
    c = import_text(
        f"{line} --timestep_sampling sigma --weighting_scheme logit_normal --logit_mean 0.5", "a.sh", dataset="x"
    ).config
    assert (c.timestep_sampling, c.logit_mean) == ("logit_normal", -0.5), "a place in the schedule: 0 is pure noise"


@pytest.mark.parametrize(("scheme", "weighting"), [("logit_normal", 2.0), ("uniform", 2.0), ("sigma_sqrt", 0.0)])
def test_the_loss_of_sd3_is_that_of_images(scheme: str, weighting: float) -> None:
    line = "accelerate launch sd3_train_network.py --network_module networks.lora_sd3 --training_shift 3 --weighting_scheme "
    result = import_text(line + scheme, "a.sh", dataset="x")
    assert (result.config.sigma_weighting, result.config.timestep_shift) == (weighting, 3.0)
    assert not any(each.startswith("weighting_scheme") for each in result.no_equivalent)
    with pytest.raises(ConfigError, match="'cosmap' with a shift of 3 has no equivalent"):
        import_text(f"{line}cosmap", "a.sh", dataset="x")


@pytest.mark.parametrize("version", ["edit", "edit-2509", "layered"])
def test_variants_of_qwen_image_that_take_images_are_refused(version: str) -> None:
    line = "python qwen_image_train_network.py --network_module networks.lora_qwen_image --dit a --model_version "
    with pytest.raises(ConfigError, match=f"model_version: '{version}' is a variant of Qwen-Image"):
        import_text(line + version, "a.sh", dataset="x")
    assert import_text(f"{line}original", "a.sh", dataset="x").config.model == "a"


# --- the others -----------------------------------------------------------------------------------------------------


def test_one_trainer_without_a_filter_adapts_every_layer(tmp_path: Path) -> None:
    c = imported(tmp_path, ONE).config
    assert (c.targets, c.train_text_encoders, c.noise_offset, c.timestep_sampling) == ((".*",), False, 0.0, "uniform")
    assert (c.rank, c.alpha, c.epochs, c.warmup, c.learning_rate, c.save_dtype) == (16, 1, 100, 200, 3e-6, "fp32")
    listed = imported(tmp_path, {**ONE, "layer_filter": "attentions", "layer_filter_preset": "attn-mlp"}).config
    preset = imported(tmp_path, {**ONE, "layer_filter_preset": "attn-mlp"}).config
    assert listed.targets == preset.targets == (".*attentions.*",)
    regex = {"layer_filter": "^(?=.*attention)(?!.*refiner).*", "layer_filter_regex": True}
    z = {**ONE, **regex, "model_type": "Z_IMAGE", "timestep_distribution": "LOGIT_NORMAL"}
    assert imported(tmp_path, z).config.targets == (regex["layer_filter"],)
    shifted = {**z, "timestep_shift": 3.0, "noising_weight": 0.5}
    c = imported(tmp_path, shifted).config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std) == ("shift", 3.0, 1.5)
    assert imported(tmp_path, {**ONE, "clip_grad_norm": None}).config.max_grad_norm == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "concept_slider"}, "'concept_slider' is not the training of a LoRA"),
        ({"slider": {"targets": [{"positive": "x"}]}}, "a slider"),
        ({"network": None}, "a full fine-tune"),
        (
            {"model": {"name_or_path": "m", "arch": "wan22_14b:t2v"}},
            "'wan22_14b:t2v' is a model that cannot be trained",
        ),
        ({"model": {"name_or_path": "m", "is_lumina2": True}}, "Lumina"),
        ({"model": {"name_or_path": "black-forest-labs/FLUX.1-Kontext-dev", "arch": "flux_kontext"}}, "Kontext"),
        ({"model": {"name_or_path": "m", "arch": "flux", "assistant_lora_path": "a"}}, "model.assistant_lora_path"),
        ({"train": {**TOOLKIT["train"], "timestep_type": "weighted"}}, "'weighted' is not supported"),
        ({"datasets": [{"folder_path": "x", "control_path": "y"}]}, "datasets.0.control_path"),
    ],
)
def test_ai_toolkit_refuses_by_name(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        toolkit(tmp_path, **changes)
    assert reason in refusal(caught)


def test_resolutions_are_datasets(tmp_path: Path) -> None:
    result = toolkit(
        tmp_path,
        datasets=[
            {"folder_path": "x", "resolution": [512, 1024], "num_repeats": 2},
            {"folder_path": "reg", "is_reg": True},
        ],
    )
    assert isinstance(result.config.dataset, dict)
    rows = [
        (t["resolution"], t["subsets"][0]["image_dir"], t["subsets"][0].get("is_reg"))
        for t in result.config.dataset["datasets"]
    ]
    assert rows == [(512, "x", None), (1024, "x", None), (512, "reg", True)]
    assert (result.config.epsilon, result.config.timestep_sampling) == (1e-6, "sigmoid")
    again = tmp_path / "ours.toml"
    again.write_text(result.config.to_toml(), "utf-8")
    assert TrainConfig.load(again).dataset == result.config.dataset


def test_simpletuner_reads_the_files_it_names(tmp_path: Path) -> None:
    backends = [
        {"id": "a", "type": "local", "instance_data_dir": "pictures", "caption_strategy": "textfile", "resolution": 512,
         "resolution_type": "pixel_area", "repeats": 2, "crop": True, "crop_aspect": "square", "crop_style": "center"},
        {"id": "t", "dataset_type": "text_embeds", "default": True},
    ]  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(backends))
    (tmp_path / "lycoris.json").write_text(
        json.dumps({"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 12,
                    "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 16}}}})
    )  # fmt: skip
    path = tmp_path / "config.json"
    text = json.dumps(
        {**TUNER, "--data_backend_config": "config/m.json", "lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    )
    path.write_text(text[:-1] + ",\n}")  # as people edit them
    c = import_config(path).config
    assert (c.network, c.rank, c.alpha, c.lokr_factor, c.dropout) == ("lokr", 10000, 1, 16, 0)
    assert isinstance(c.dataset, dict)
    (table,) = c.dataset["datasets"]
    assert (table["resolution"], table["enable_bucket"], table["subsets"][0]["num_repeats"]) == (512, False, 3)
    flux = imported(tmp_path, {**TUNER, "model_family": "flux", "lora_rank": 32}).config
    assert (flux.alpha, flux.timestep_sampling, flux.timestep_shift, flux.dropout, flux.guidance) == (
        32,
        "shift",
        3.0,
        0.1,
        1.0,
    )
    assert "to_add_out" in flux.targets and "proj_mlp" not in flux.targets


def test_the_tables_of_an_import_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbered folders, a regularization folder and two resolutions, relative to the current folder."""
    from PIL import Image

    from inweave.training.data.reader import read_dataset

    for name in ("train/3_cat", "reg/1_animal"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (64, 64), (9, 9, len(name))).save(tmp_path / name / "a.png")
    monkeypatch.chdir(tmp_path)
    c = import_text(f"{SHELL} --train_data_dir train --reg_data_dir reg --caption_prefix 'x, '", "a.sh").config
    assert isinstance(c.dataset, dict)
    rows = [(e.repeats, e.regularization, e.captions, e.subset.prefix) for e in read_dataset(c.dataset).examples]
    assert rows == [(3, False, ("cat",), "x, "), (1, True, ("animal",), "x, ")]
    (tmp_path / "train" / "a.txt").write_text("a cat")
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "train" / "a.png")
    both = toolkit(tmp_path, datasets=[{"folder_path": "train", "resolution": [32, 64]}]).config
    assert isinstance(both.dataset, dict)
    assert [each.subset.resolution for each in read_dataset(both.dataset).examples] == [(32, 32), (64, 64)]
    with pytest.raises(
        ConfigError, match=r"dataset: datasets\[0\]\.subsets\[0\]\.image_dir: expected the path of a folder"
    ):
        read_dataset({"datasets": [{"subsets": [{"image_dir": "none"}]}]})
