"""SimpleTuner's configurations: its optimizers, and the files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import import_config
from tests.unit.training.importers.small_imports import TUNER, imported


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
