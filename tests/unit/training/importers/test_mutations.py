"""Random changes of configurations of every trainer: an error in words, or a run whose TOML can be read again."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, InweaveError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import import_table
from inweave.training.importers.files import leaves_of, parse_text
from inweave.training.importers.shell import parse_command
from tests.unit.training.importers.other_trainers import AI_TOOLKIT, KOHYA, ONE_TRAINER
from tests.unit.training.importers.small_imports import GUI

ROUNDS = 60  # of each configuration; longer runs have found what is fixed

SUBSET = {"image_dir": "x", "num_repeats": 2, "class_tokens": "a cat", "keep_tokens": 1, "flip_aug": True}
DATASET = {
    "general": {"enable_bucket": True, "shuffle_caption": True, "caption_extension": ".txt"},
    "datasets": [{"resolution": [512, 768], "batch_size": 2, "subsets": [SUBSET, {"image_dir": "y", "is_reg": True}]}],
}
KOHYA_COMMAND = parse_command(
    "accelerate launch flux_train_network.py --network_module networks.lora_flux --network_dim 8 --ae a --clip_l c "
    "--network_args train_blocks=single split_qkv=True --pretrained_model_name_or_path m --t5xxl t --optimizer_type "
    "adafactor --optimizer_args relative_step=False --model_prediction_type raw --timestep_sampling shift "
    "--guidance_scale 1 --max_train_epochs 2 --cache_text_encoder_outputs --network_train_unet_only "
    "--train_data_dir x --reg_data_dir y --enable_wildcard"
)
EASY = {
    "subsets": [{"image_dir": "x", "num_repeats": 1, "name": "n", "shuffle_caption": True}],
    "train_mode": "lora",
    "general_args": {"args": {"pretrained_model_name_or_path": "m", "max_train_epochs": 3}, "dataset_args": {
        "resolution": 1024, "batch_size": 2}},
    "network_args": {"args": {"network_dim": 8, "network_args": {"conv_dim": 4, "algo": "locon"}}},
    "optimizer_args": {"args": {"optimizer_type": "AdamW", "warmup_ratio": 0.1,
                                "optimizer_args": {"weight_decay": 0.1, "betas": [0.9, 0.99]}}},
    "bucket_args": {"dataset_args": {"enable_bucket": True, "min_bucket_reso": 256}},
}  # fmt: skip
DIFFUSERS = parse_command(
    "accelerate launch train_dreambooth_lora_sdxl.py --pretrained_model_name_or_path m --instance_data_dir x "
    "--instance_prompt 'a cat' --class_data_dir y --class_prompt cat --with_prior_preservation --rank 8 "
    "--mixed_precision fp16 --train_batch_size 1 --max_train_steps 9 --validation_prompt 'a cat' --report_to wandb"
)
BACKENDS = [
    {
        "id": "a", "type": "local", "instance_data_dir": "x", "repeats": 1, "resolution": 512, "crop": True,
        "crop_style": "center", "caption_strategy": "textfile", "caption_shuffle": {"enable": True, "count": 2},
    },
    {"id": "b", "instance_data_dir": "y", "resolution": 0.5, "resolution_type": "area", "caption_strategy": "textfile",
     "instance_prompt": "p", "prepend_instance_prompt": True},
    {"id": "t", "dataset_type": "text_embeds", "default": True},
]  # fmt: skip
TUNER = {
    "--model_family": "flux", "--model_type": "lora", "--lora_rank": 16, "--optimizer": "adamw_bf16",
    "--lr_scheduler": "polynomial", "--max_train_steps": 9, "--pretrained_model_name_or_path": "m",
    "--data_backend_config": BACKENDS, "--validation_prompt": "a cat", "--validation_resolution": "512x768",
    "--disable_assistant_lora": True, "--flux_lora_target": "all+ffs", "--timestep_bias_strategy": "none",
}  # fmt: skip
LYCORIS = {
    **TUNER, "--lora_type": "lycoris", "--lycoris_config": {
        "algo": "lokr", "linear_dim": 8, "linear_alpha": 1, "factor": 12,
        "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 12}}},
    },
}  # fmt: skip
MUSUBI = {
    **parse_command("python qwen_image_train_network.py --dit d --vae v --text_encoder t --network_dim 8 "
                    "--network_module networks.lora_qwen_image --timestep_sampling shift --discrete_flow_shift 2.2"),
    "dataset_config": {"general": {"resolution": [960, 544], "caption_extension": ".txt"},
                       "datasets": [{"image_directory": "x", "cache_directory": "c", "num_repeats": 1}]},
}  # fmt: skip
PIPE: dict[str, Any] = {
    "output_dir": "runs", "dataset": "d.toml", "epochs": 9, "micro_batch_size_per_gpu": [[512, 4], [1024, 1]],
    "save_every_n_examples": 100, "lr_scheduler": "cosine", "eval_datasets": [{"name": "e", "config": "e.toml"}],
    "model": {"type": "z_image", "diffusion_model": "m", "vae": "v", "dtype": "bfloat16", "shift": 3,
              "text_encoders": [{"path": "t", "type": "lumina2"}], "merge_adapters": ["a"]},
    "adapter": {"type": "lora", "rank": 16, "dtype": "bfloat16"},
    "optimizer": {"type": "adamw_optimi", "lr": 1e-4, "betas": [0.9, 0.99], "beta2_half_life": 1e4},
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "kohya": parse_text(KOHYA, Path("a.toml")),
    "kohya dataset": {**parse_text(KOHYA, Path("a.toml")), "dataset_config": DATASET},
    "kohya command": KOHYA_COMMAND,
    "musubi": MUSUBI,
    "kohya_ss": {**GUI, "train_data_dir": "x", "pretrained_model_name_or_path": "m"},
    "LoRA_Easy_Training_Scripts": EASY,
    "OneTrainer": {
        **copy.deepcopy(ONE_TRAINER),
        "perturbation_noise_weight": 0,
        "samples": [{"prompt": "a", "width": 512, "seed": 3}],
    },
    "ai-toolkit": parse_text(AI_TOOLKIT, Path("a.yaml")),
    "SimpleTuner": TUNER,
    "SimpleTuner with LyCORIS": LYCORIS,
    "diffusers": DIFFUSERS,
    "diffusion-pipe": PIPE,
}
VALUES: tuple[Any, ...] = (
    None, "", 0, -1, 1, 3, 0.5, True, False, "true", "None", "x", "1e-4", "512,512", "a=b", 1e308, 10**400, 2**70, -0.0,
    float("nan"), float("inf"), "nan", "1e999", [], {}, [[]], [1, "a"], [[1, 2], [3]], {"a": {"b": 1}}, [{"c": None}],
    ["a=b", "c"], [None], "\ud800", "a\nb", "../../x", "C:\\x\\y", "/none/x.json", "é" * 500, "$HOME", "{a|b}", 1024,
)  # fmt: skip


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*at, key)
        yield from _places(each, (*at, key))


def mutated(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a table with up to three settings deleted, replaced, swapped, wrapped or added."""
    table = copy.deepcopy(table)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(table))
        if not places:
            return table
        inner: Any = table
        *path, key = rng.choice(places)
        for each in path:
            inner = inner[each]
        match rng.randrange(6):
            case 0:
                del inner[key]
            case 1:
                inner[key] = [inner[key]]
            case 2:
                inner[key] = {"a": inner[key]}
            case 3 if isinstance(inner, dict):
                inner[rng.choice([*map(str, inner), "unknown"]) + rng.choice(("", "_x", ".0.a"))] = copy.deepcopy(
                    rng.choice(VALUES)
                )
            case 4:
                inner[key] = str(inner[key])
            case _:
                inner[key] = copy.deepcopy(rng.choice(VALUES))
    return table


def check(table: dict[str, Any], path: Path, without: tuple[str, ...] = ()) -> bool:
    """Import a table; return whether it becomes a run, whose TOML can be read again."""
    if isinstance(dataset := table.get("dataset_config"), dict):  # a file of its own
        path.with_name("set.json").write_text(json.dumps(dataset), "utf-8")
        table = {**table, "dataset_config": "set.json"}
    folder = {"dataset": "x"} if table.get("dataset") == "d.toml" else {}  # its file is not there
    try:
        result = import_table(table, path, without=without, **folder)
    except InweaveError as error:
        assert str(error) and len(str(error)) < 50_000
        return False
    result.report(), result.report(verbose=True)
    json.dumps(result.config.model_dump(mode="json", exclude_unset=True))
    text = result.config.to_toml()
    assert not text.encode().decode().count("\0")
    path.with_suffix(".toml").write_text(text, "utf-8")
    again = TrainConfig.load(path.with_suffix(".toml"))
    assert again.model_dump() == result.config.model_dump()
    return True


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", WHOLE)
def test_mutations_never_end_in_a_traceback(kind: str, tmp_path: Path) -> None:
    rng = random.Random(f"import {kind}")
    for _ in range(ROUNDS):
        table = mutated(WHOLE[kind], rng)
        left_out = rng.choice([*leaves_of(table), ""]).replace("config.process.0.", "").lstrip("-")
        check(table, tmp_path / "theirs.json", (left_out,) if rng.random() < 0.2 else ())


@pytest.mark.parametrize("kind", WHOLE)
def test_the_configurations_themselves_can_be_imported(kind: str, tmp_path: Path) -> None:
    assert check(WHOLE[kind], tmp_path / "theirs.json")


@pytest.mark.parametrize(
    ("changes", "without"), [({"mixed_precision": "int8"}, ()), ({"mixed_precision": "int8"}, ("mixed_precision",))]
)
def test_a_precision_that_is_refused_is_no_crash(changes: dict[str, Any], without: tuple[str, ...]) -> None:
    flux = {**DIFFUSERS, "script": "train_dreambooth_lora_flux.py", **changes}
    with pytest.raises(ConfigError, match="mixed_precision: 'int8' is not supported"):
        import_table(flux, Path("a.sh"), without=without)
    assert import_table(flux, Path("a.sh"), precision="bf16").config.save_dtype == "bf16"


def test_a_setting_that_others_need_cannot_be_left_out() -> None:
    with pytest.raises(ConfigError, match="rank: is needed by other settings"):
        import_table(DIFFUSERS, Path("a.sh"), without=["rank"])
