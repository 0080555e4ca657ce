"""OneTrainer, ai-toolkit and SimpleTuner: layers, resolutions, and the files that a file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import import_config, import_text
from tests.unit.training.importers.small_imports import ONE, SHELL, TOOLKIT, TUNER, imported, refusal, toolkit


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


def test_a_folder_of_the_command_is_read_as_the_file_says(tmp_path: Path) -> None:
    """Without a dataset its trainer's options of one are written; with one, that folder's own stay."""
    tuner = imported(tmp_path, {**TUNER, "loss_type": "huber"}).config
    assert (tuner.resolution, tuner.caption_extensions, tuner.crop, tuner.upscale) == (1024, (".txt",), "center", True)
    assert (tuner.loss, tuner.huber_c, tuner.huber_schedule) == ("huber", 0.1, "snr")
    one = imported(tmp_path, ONE).config
    assert (one.resolution, one.caption_extensions, one.crop, one.flip) == (512, (".txt",), "random", True)
    path = tmp_path / "job.json"
    job: dict[str, Any] = {"job": "extension", "config": {"name": "n", "process": [{**TOOLKIT, "datasets": [
        {"folder_path": "a", "resolution": [512, 768], "num_repeats": 3}]}]}}  # fmt: skip
    path.write_text(json.dumps(job), "utf-8")
    c = import_config(path, dataset="b").config
    assert isinstance(c.dataset, dict)
    tables = [
        (table["resolution"], *(table["subsets"][0][key] for key in ("image_dir", "num_repeats")))
        for table in c.dataset["datasets"]
    ]
    assert tables == [(512, "b", 3), (768, "b", 3)]
    assert import_config(path, dataset="b.toml").config.dataset == "b.toml"
    job["config"]["process"][0]["datasets"].append({"folder_path": "c"})
    path.write_text(json.dumps(job), "utf-8")
    several = import_config(path, dataset="b")
    assert several.config.dataset == "b" and any("has several folders" in note for note in several.notes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"multiplier": 2.0}, "lycoris_config.multiplier: 2.0: is not supported"),
        ({"unbalanced_factorization": True}, "lycoris_config.unbalanced_factorization: True"),
        ({"weight_decompose": True}, "lycoris_config.weight_decompose: True"),
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


def test_what_differs_although_no_setting_does_is_reported(tmp_path: Path) -> None:
    def about(result: Any) -> set[str]:
        return {line.partition(":")[0] for line in result.notes} & {"buckets", "captions"}

    assert about(imported(tmp_path, ONE)) == about(toolkit(tmp_path)) == {"buckets"}
    assert about(import_text(SHELL, "train.sh", dataset="pictures")) == {"captions"}
    assert about(import_text(f"{SHELL.rstrip()} --enable_wildcard", "train.sh", dataset="pictures")) == set()
