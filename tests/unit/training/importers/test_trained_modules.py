"""An import trains what the other trainer would: its defaults, and the modules that it adapts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inweave.training.config.fields import setting_facts
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.defaults import defaults, trainers
from inweave.training.importers.detect import import_text
from tests.unit.training.importers.small_imports import GUI, ONE, SHELL, TUNER, gui, imported, toolkit


def test_every_trainer_has_a_table_of_defaults_with_its_version() -> None:
    known = "kohya kohya_ss onetrainer ai_toolkit simpletuner diffusers diffusion_pipe models"
    assert trainers().keys() == {*known.split()}
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
        0,
    )


@pytest.mark.parametrize(
    ("kind", "family"), [("gui", "sdxl"), ("one", "sdxl"), ("toolkit", "flux"), ("tuner", "sdxl"), ("shell", "sd")]
)
def test_no_preset_of_ours_changes_an_import(kind: str, family: str, tmp_path: Path) -> None:
    """SDXL's preset alone would add min-SNR, a noise offset and other targets."""
    results = {
        "gui": lambda: imported(tmp_path, GUI), "one": lambda: imported(tmp_path, ONE),
        "toolkit": lambda: toolkit(tmp_path),
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
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, layers_per_block=1,
        norm_num_groups=8, attention_head_dim=4,
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
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
    }  # fmt: skip
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**(large if sdxl else {}))
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
