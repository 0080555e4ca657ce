"""SimpleTuner's configurations: its optimizers, and the files that they name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import import_config, import_text
from inweave.training.importers.simpletuner.env import parse_env
from inweave.training.optim.schedules import learning_rate_at
from inweave.training.output.sample_prompts import sample_requests
from tests.unit.training.importers.other_trainers import write_text
from tests.unit.training.importers.small_imports import TOOLKIT, TUNER, imported, toolkit


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_bf16", ("adamw", (0.9, 0.999), 0.01, 1e-6)), ("optimi-adamw", ("adamw", (0.9, 0.99), 0.0, 1e-6)),
        ("bnb-adamw8bit", ("adamw8bit", (0.9, 0.999), 0.01, 1e-6)), ("optimi-lion", ("lion", (0.9, 0.99), 0.0, None)),
        ("adamw_schedulefree", ("schedulefree", (0.9, 0.999), 0.01, 1e-8)),
    ],
)  # fmt: skip
def test_simpletuner_has_values_of_its_own_for_optimizers(name: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    c = imported(tmp_path, {**TUNER, "optimizer": name, "lr_scheduler": "constant"}).config
    assert (c.optimizer, c.betas, c.weight_decay) == expected[:3]
    assert expected[3] is None or c.epsilon == expected[3]
    with pytest.raises(ConfigError, match="ProdigyPlusScheduleFree"):
        imported(tmp_path, {**TUNER, "optimizer": "prodigy"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"multiplier": 2.0}, "lycoris_config.multiplier: 2.0: is not supported"),
        ({"unbalanced_factorization": True}, "lycoris_config.unbalanced_factorization: True"),
        ({"weight_decompose": True}, "lycoris_config.weight_decompose: True"),
        ({"algo": "lora", "use_tucker": True}, "lycoris_config.use_tucker: 'lora' has no Tucker core"),
        ({"algo": "lora", "rank_dropout": 0.1}, "lycoris_config.rank_dropout: 0.1: with bypass_mode LyCORIS drops"),
        ({"algo": "lora", "dora_wd": True}, "with bypass_mode LyCORIS leaves the magnitudes of dora_wd out"),
        ({"full_matrix": True, "decompose_both": True}, "decompose_both: with full_matrix"),
        ({"apply_preset": {"module_algo_map": {"Attention": {"algo": "lora", "dim": 8}}}},
        "module_algo_map.Attention.algo"),
        ({"apply_preset": {"module_algo_map": {"Attention": {"factor": 8}}}}, "all modules share one LoKr factor"),
        ({"apply_preset": {"name_algo_map": {"x": {}}}}, "apply_preset.name_algo_map"),
    ],
)  # fmt: skip
def test_every_option_of_a_lycoris_file_is_read_or_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    plain = {
        "algo": "lokr",
        "multiplier": 1.0,
        "linear_dim": 10000,
        "linear_alpha": 1,
        "factor": 12,
        "bypass_mode": True,
    }
    (tmp_path / "lycoris.json").write_text(json.dumps(plain), "utf-8")
    table = {**TUNER, "lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    c = imported(tmp_path, table).config
    assert (c.network, c.rank, c.lokr_factor) == ("lokr", 10000, 12)
    (tmp_path / "lycoris.json").write_text(json.dumps({**plain, **changes}), "utf-8")
    with pytest.raises(ConfigError, match=why):
        imported(tmp_path, table)


def test_options_of_lycoris_are_those_of_the_trainer_here(tmp_path: Path) -> None:
    table = {**TUNER, "lora_type": "lycoris", "lycoris_config": "lycoris.json"}

    def write(**options: Any) -> None:
        (tmp_path / "lycoris.json").write_text(json.dumps({"algo": "lokr", "linear_dim": 8, **options}), "utf-8")

    write(use_tucker=True, rank_dropout=0.1, module_dropout=0.2)
    c = imported(tmp_path, table).config
    assert (c.network, c.tucker, c.rank_dropout, c.module_dropout) == ("lokr", True, 0.1, 0.2)
    write(bypass_mode=True, rank_dropout=0.1, decompose_both=True)
    c = imported(tmp_path, table).config
    assert (c.rank_dropout, c.lokr_decompose_both) == (0, True), "LyCORIS drops nothing of a LoKr then"
    write(algo="locon", rank_dropout=0.1)
    assert imported(tmp_path, table).config.output_dropout == 0.1
    write(train_norm=True, module_dropout=0.2)
    with pytest.raises(ConfigError, match="with module_dropout, LyCORIS drops the differences of norms too"):
        imported(tmp_path, table)
    write(train_norm=True)
    assert imported(tmp_path, table).config.train_norm
    with pytest.raises(ConfigError, match="train_norm: no LayerNorm or GroupNorm of this model has weights"):
        imported(tmp_path, {**table, "model_family": "flux"})


def with_backends(tmp_path: Path, *backends: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A configuration next to its backends, of which each has an id and text files unless it says otherwise."""
    listed = [{"id": str(n), "caption_strategy": "textfile", **each} for n, each in enumerate(backends)]
    (tmp_path / "backends.json").write_text(json.dumps(listed), "utf-8")
    return {**TUNER, "data_backend_config": "backends.json", **settings}


def rates_of(config: TrainConfig, count: int) -> list[float]:
    return [config.learning_rate * learning_rate_at(config, step, count) for step in range(count)]


def test_its_own_defaults_are_written(tmp_path: Path) -> None:
    plain = {name: value for name, value in TUNER.items() if name not in ("lr_scheduler", "optimizer")}
    c = imported(tmp_path, plain).config
    assert (c.lr_scheduler, c.warmup, c.caption_dropout, c.gradient_checkpointing) == ("constant", 0, 0.1, "full")
    assert (c.max_grad_norm, c.max_grad_value, c.keep_last, c.optimizer) == (0, 2.0, 5, "adamw")
    c = imported(tmp_path, {**plain, "grad_clip_method": "norm", "max_grad_norm": 0.5}).config
    assert (c.max_grad_norm, c.max_grad_value) == (0.5, 0)


def test_its_schedules_are_its_own_curves(tmp_path: Path) -> None:
    """cosine is a wave from lr to lr_end whose half is the warmup, or 1000 steps; polynomial ends at lr_end."""
    plain = {**TUNER, "learning_rate": 1e-4, "max_train_steps": 20}
    for warmup, half in ((4, 4), (0, 1000)):
        c = imported(tmp_path, {**plain, "lr_scheduler": "cosine", "lr_warmup_steps": warmup}).config
        theirs = [4e-7 + (1e-4 - 4e-7) * (1 + math.cos(math.pi * step / half)) / 2 for step in range(20)]
        assert rates_of(c, 20) == pytest.approx(theirs, rel=1e-6)
    c = imported(tmp_path, {**plain, "lr_scheduler": "polynomial", "lr_end": 2e-5}).config
    theirs = [2e-5 + (1e-4 - 2e-5) * (1 - step / 20) ** 0.8 for step in range(20)]
    assert rates_of(c, 20) == pytest.approx(theirs)
    c = imported(tmp_path, {**plain, "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 5}).config
    assert (c.lr_scheduler, c.warmup) == ("constant", 5)
    for name in ("sine", "cosine_with_restarts"):
        with pytest.raises(ConfigError, match=f"'{name}' is a .*--set lr_scheduler="):
            imported(tmp_path, {**plain, "lr_scheduler": name})
        assert imported(tmp_path, {**plain, "lr_scheduler": name}, lr_scheduler="rex").config.lr_scheduler == "rex"


def test_a_dataset_of_the_hub_keeps_everything_but_its_images(tmp_path: Path) -> None:
    hub = {
        "type": "huggingface", "dataset_name": "a/b", "resolution": 512, "resolution_type": "pixel_area", "crop": True,
        "crop_style": "center", "caption_strategy": "instanceprompt", "instance_prompt": "a knight", "repeats": 4,
        "metadata_backend": "huggingface", "minimum_image_size": 256,
    }  # fmt: skip
    table = with_backends(tmp_path, hub)
    result = imported(tmp_path, table)
    c = result.config
    assert (c.resolution, c.caption, c.crop, c.caption_extensions) == (512, "a knight", "center", (".no-captions",))
    assert isinstance(c.dataset, dict)
    (row,) = c.dataset["datasets"]
    assert (row["resolution"], row["enable_bucket"]) == (512, False)
    assert (row["subsets"][0]["image_dir"], row["subsets"][0]["num_repeats"]) == ("pictures", 5)
    assert not {"resolution", "resolution_type", "caption_strategy"} & result.defaults.keys()
    reported = "\n".join(result.no_equivalent)
    assert "minimum_image_size: 256: no image is left out" in reported and "'a/b': is not downloaded" in reported
    for backends in ([hub], [hub, {"instance_data_dir": "pictures"}]):
        (tmp_path / "theirs.json").write_text(json.dumps(with_backends(tmp_path, *backends)), "utf-8")
        with pytest.raises(ConfigError, match=r"dataset.*is required"):
            import_config(tmp_path / "theirs.json")


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ({"conditioning": {"type": "canny"}}, r"0\.conditioning: a table: is not supported"),
        ({"conditioning_data": "edges"}, r"0\.conditioning_data: 'edges'"),
        ({"type": "huggingface", "conditioning": [{"type": "canny"}]}, r"0\.conditioning: "),
        ({"dataset_type": "conditioning"}, r"0\.dataset_type: 'conditioning'"),
        ({"is_regularization_data": True}, "the base model's own prediction"),
        ({"timestep_sampling_offset": -0.5}, "timestep_sampling_offset: -0.5"),
        ({"probability": 0.3}, "probability: 0.3"), ({"start_epoch": 3}, "start_epoch: 3"),
        ({"caption_strategy": "filename"}, "'filename': captions are files"),
        ({"slider_strength": 1}, "slider_strength"),
        ({"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": [1.0]}, "crop_aspect: 'closest'"),
        ({"caption_filter_list": "x.txt"}, "caption_filter_list"), ({"train_batch_size": 7}, "train_batch_size: 7"),
    ],
)  # fmt: skip
def test_what_a_backend_alone_has_is_refused(backend: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(tmp_path, with_backends(tmp_path, {"instance_data_dir": "pictures", **backend}))


def test_a_default_that_changes_training_is_not_silent(tmp_path: Path) -> None:
    """A backend that does not name a caption_strategy has names of files as captions."""
    (tmp_path / "backends.json").write_text(json.dumps([{"id": "a", "instance_data_dir": "x"}]), "utf-8")
    table = {**TUNER, "data_backend_config": "backends.json"}
    with pytest.raises(ConfigError, match="'filename': captions are files"):
        imported(tmp_path, table)
    assert imported(tmp_path, table, caption_extensions=[".txt"]).config.caption_extensions == (".txt",)
    biased = {**TUNER, "timestep_bias_strategy": "later"}
    with pytest.raises(ConfigError, match="timestep_bias_strategy: 'later': timesteps are sampled evenly"):
        imported(tmp_path, biased)
    flow = imported(tmp_path, {**biased, "model_family": "flux"})
    assert any("timestep_bias_strategy: SimpleTuner ignores it" in note for note in flow.notes)
    assert imported(tmp_path, {**TUNER, "timestep_bias_strategy": "none"}).config


def test_shuffled_captions_and_samples_carry_over(tmp_path: Path) -> None:
    shuffle = {"enable": True, "count": 3, "position_start": 1, "split_on": "comma"}
    prompts = {"validation_prompt": "a knight", "validation_resolution": "512x768", "validation_seed": 7}
    table = with_backends(tmp_path, {"instance_data_dir": "pictures", "caption_shuffle": shuffle}, **prompts)
    c = imported(tmp_path, table).config
    assert (c.shuffle_tags, c.keep_tokens, c.tag_separator, c.caption_variants) == (True, 1, ",", 4)
    assert c.sample_prompts == ("a knight --n blurry, cropped, ugly --w 512 --h 768",) and c.sample_seed == 7
    ((_, request),) = sample_requests(c)
    assert (request.negative_prompt, request.width, request.height) == ("blurry, cropped, ugly", 512, 768)
    plain = imported(tmp_path, {**TUNER, **prompts, "model_family": "flux", "validation_resolution": 512}).config
    assert plain.sample_prompts == ("a knight --w 512 --h 512",)


def test_a_model_that_is_trained_with_an_assistant_is_not_trained_without_it(tmp_path: Path) -> None:
    turbo = {**TUNER, "model_family": "z_image", "model_flavour": "turbo"}
    with pytest.raises(ConfigError, match=r"ostris/zimage_turbo_training_adapter merged in.*--set assistant="):
        imported(tmp_path, turbo)
    assert imported(tmp_path, turbo, assistant="a.safetensors").config.assistant == "a.safetensors"
    for plain in ({**turbo, "disable_assistant_lora": True}, {**turbo, "model_flavour": "base"}):
        assert imported(tmp_path, plain).config.assistant is None


@pytest.mark.parametrize(
    ("family", "flavor", "model"),
    [
        ("flux", None, "black-forest-labs/FLUX.1-Krea-dev"), ("flux", "dev", "black-forest-labs/FLUX.1-dev"),
        ("sd3", None, "stabilityai/stable-diffusion-3.5-medium"), ("qwen_image", "v1.0", "Qwen/Qwen-Image"),
        ("sd1x", "dreamshaper", "Lykon/dreamshaper-8"), ("z_image", "base", "Tongyi-MAI/Z-Image"),
        ("flux2", "klein-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
        ("flux2", "dev", "black-forest-labs/FLUX.2-dev"),
    ],
)  # fmt: skip
def test_a_flavor_is_a_model(family: str, flavor: str | None, model: str, tmp_path: Path) -> None:
    table = {**TUNER, "model_family": family, "model_flavour": flavor}
    assert imported(tmp_path, table).config.model == model
    assert imported(tmp_path, {**table, "pretrained_model_name_or_path": "mine"}).config.model == "mine"
    with pytest.raises(ConfigError, match=r"model_flavour: 'mine': its model is not known here.*--set model="):
        imported(tmp_path, {**table, "model_flavour": "mine"})


def test_flux2_is_adapted_in_its_attention_and_shifts_by_a_number(tmp_path: Path) -> None:
    table = {**TUNER, "model_family": "flux2", "model_flavour": "klein-9b"}
    c = imported(tmp_path, table).config
    assert c.targets == ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj")
    assert (c.timestep_sampling, c.timestep_shift, c.guidance) == ("shift", 3.0, 1.0)
    with pytest.raises(ConfigError, match=r"flow_schedule_auto_shift: .*a quarter of this model's tokens"):
        imported(tmp_path, {**table, "flow_schedule_auto_shift": True})


def test_paths_of_another_machine_are_named(tmp_path: Path) -> None:
    """Files are found next to the configuration whatever their path was; folders that are not here are reported."""
    table = with_backends(tmp_path, {"instance_data_dir": "D:\\pictures\\me"})
    (tmp_path / "theirs.json").write_text(
        json.dumps({**table, "data_backend_config": "/home/me/config/backends.json"}), "utf-8"
    )
    result = import_config(tmp_path / "theirs.json")
    assert result.config.dataset == "D:\\pictures\\me"
    assert any("there is no such folder on this machine" in line for line in result.no_equivalent)
    (tmp_path / "theirs.json").write_text(json.dumps({**table, "data_backend_config": "C:\\none.json"}), "utf-8")
    with pytest.raises(ConfigError, match=r"data_backend_config \(dataset\): is required"):
        import_config(tmp_path / "theirs.json")


ENV = """# a comment
export MODEL_TYPE='lora'
export MODEL_FAMILY="sdxl"
export MODEL_NAME="base.safetensors"
export DATALOADER_CONFIG='config/backends.json'
export MAX_NUM_STEPS=300   # of the optimizer
export NUM_EPOCHS=0
export LEARNING_RATE=8e-5
export LR_SCHEDULE="polynomial"
export USE_GRADIENT_CHECKPOINTING=true
export VALIDATION_PROMPT="a photo in 'Paris'"
export TRAINING_NUM_PROCESSES=1
export TRAINER_EXTRA_ARGS="--lora_rank=8 --snr_gamma 5"
TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --lr_end 8e-6"
TRAINER_EXTRA_ARGS+=" --disable_benchmark"
"""


def test_variables_of_a_config_env_are_the_flags(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    backend = {"id": "a", "type": "local", "instance_data_dir": "photos", "caption_strategy": "textfile"}
    (tmp_path / "config" / "backends.json").write_text(json.dumps([backend]), "utf-8")
    result = import_config(write_text(tmp_path, ENV, "config.env"))
    c = result.config
    assert (result.kind, c.model, c.dataset, c.rank, c.steps, c.learning_rate) == (
        "SimpleTuner", "base.safetensors", "photos", 8, 300, 8e-5,
    )  # fmt: skip
    assert (c.lr_scheduler, c.min_snr_gamma) == ("polynomial", 5) and c.lr_min_ratio == pytest.approx(0.1)
    assert c.sample_prompts == ("a photo in 'Paris' --n blurry, cropped, ugly --w 256 --h 256",)
    assert not any("is not known here" in line for line in result.no_equivalent)


def test_values_of_a_config_env_span_lines() -> None:
    text = (
        "# not 'closed; export A=1 \\\nexport MODEL_FAMILY=flux; export SEED=3  # it's a comment\n"
        'export TRAINER_EXTRA_ARGS="--lora_rank=8 \\\n  --snr_gamma 5\n--lr_end 8e-6"\n'
        "TRAINER_EXTRA_ARGS+=' --flow\nBATCH=2' && export STEPS=\\\n7;\r\n"
        "HUB_MODEL_NAME=me/x#1\nEMPTY=\nLAST='a; b'"
    )
    assert parse_env(text, "config.env") == {
        "model_family": "flux", "seed": 3, "lora_rank": 8, "snr_gamma": 5, "lr_end": 8e-6, "flow": "BATCH=2",
        "steps": 7, "hub_model_id": "me/x#1", "empty": "", "last": "a; b",
    }  # fmt: skip


@pytest.mark.parametrize("value", ['"a\nexport SEED=1\n', "it's\n", "'a", "a\\"])
def test_a_value_of_a_config_env_must_end(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.env: line 2: the value of MODEL_NAME has a quote that is not"):
        import_config(write_text(tmp_path, f"MODEL_FAMILY=flux\nMODEL_NAME={value}", "config.env"))


def test_older_names_of_the_flow_settings_count(tmp_path: Path) -> None:
    flux = {**TUNER, "model_family": "flux", "disable_assistant_lora": True, "pretrained_model_name_or_path": "m"}
    c = imported(tmp_path, {**flux, "flux_schedule_auto_shift": True}).config
    assert (c.timestep_sampling, c.timestep_shift) == ("shift", None)


def test_a_configuration_as_the_web_interface_keeps_it(tmp_path: Path) -> None:
    """It has the flags inside, and a name of its own: nothing of it is taken for our own settings."""
    flags = {f"--{name}": value for name, value in TUNER.items()}
    wrapped_file = {"_metadata": {"name": "default", "model_family": None, "is_template": False}, "config": flags}
    result = imported(tmp_path, wrapped_file)
    assert result.kind == "SimpleTuner" and result.config == imported(tmp_path, TUNER).config
    with pytest.raises(ConfigError, match="is not recognized"):
        imported(tmp_path, {"name": "x", "seed": 3, "who": 1, "what": 2, "when": 3})
    with pytest.raises(ConfigError, match="is a list, such as of folders, not a training run"):
        import_config(write_text(tmp_path, '[{"id": "a", "instance_data_dir": "x"}]', "multidatabackend.json"))


def test_zero_is_a_value_and_not_a_default(tmp_path: Path) -> None:
    """An alpha of 0 is the rank in LyCORIS and in kohya; a beta or a warmup of 0 is none."""
    assert imported(tmp_path, {**TUNER, "optimizer_beta1": 0.0, "optimizer_beta2": 0.99}).config.betas == (0.0, 0.99)
    lycoris = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 0, "apply_preset": {"target_module": ["Attention"]}}
    c = imported(tmp_path, {**TUNER, "lora_type": "lycoris", "lycoris_config": lycoris}).config
    assert (c.rank, c.alpha) == (8, None)
    line = "accelerate launch train_network.py --network_module networks.lora --network_alpha 0 --network_args "
    line += f"block_dims={','.join(['4'] * 25)}"
    rules = import_text(line, "a.sh", dataset="x").config.rules
    assert rules and {(rule.rank, rule.alpha) for rule in rules} == {(4, 4.0)}
    constant = {
        **TOOLKIT["train"],
        "lr_scheduler": "constant_with_warmup",
        "lr_scheduler_params": {"num_warmup_steps": 0},
    }
    assert toolkit(tmp_path, train=constant).config.warmup == 0
