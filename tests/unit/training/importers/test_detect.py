"""Files of every trainer: recognized by their contents, and refused if they do not train an adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, InweaveError
from inweave.training.importers.detect import import_config
from tests.unit.training.importers.other_trainers import AI_TOOLKIT, KOHYA, ONE_TRAINER, write_text
from tests.unit.training.importers.small_imports import TOOLKIT, imported, toolkit


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
    text = str(caught.value)
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
        ('{"training_method": "LORA"', "not valid JSON"), ("network_dim = \n", "line 1"),
        ("a: [", "neither TOML"),
        ("a: !!python/object/apply:os.system ['true']", "neither TOML"),
        ('[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "x"\n', "is a dataset"),
        ("[a]\nseed = 1\n[b]\nseed = 2\n", "set twice"),
    ],
)  # fmt: skip
def test_files_that_are_not_a_training_run_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InweaveError, match=message):
        import_config(write_text(tmp_path, text))


WANDB: dict[str, tuple[dict[str, Any], tuple[bool, bool, str, str | None]]] = {
    "kohya": ({"log_with": "wandb", "wandb_run_name": "r", "log_tracker_name": "p", "wandb_api_key": "a-secret"},
              (False, True, "p", "r")),
    "kohya, both": ({"log_with": "all", "logging_dir": "logs"}, (True, True, "network_train", None)),
    "kohya, neither": ({"wandb_run_name": "r", "log_tracker_name": "p"}, (False, False, "inweave", "r")),
    "kohya_ss": ({"LoRA_type": "Standard", "use_wandb": True, "wandb_run_name": "r", "wandb_api_key": "a-secret"},
                 (False, True, "network_train", "r")),
    "kohya_ss of today": ({"LoRA_type": "Standard", "log_with": "wandb", "use_wandb": False},
    (False, True, "network_train", None)),
    "SimpleTuner": ({"model_family": "sdxl", "model_type": "lora", "report_to": "tensorboard,wandb",
                     "tracker_project_name": "p", "tracker_run_name": "r"}, (True, True, "p", "r")),
    "SimpleTuner, none": ({"model_family": "sdxl", "model_type": "lora", "report_to": "none", "tracker_run_name": "r"},
                          (False, False, "inweave", None)),
    "ai-toolkit": ({"config": {"name": "n", "process": [{"network": {"type": "lora"}, "model": {"name_or_path": "m"},
                    "logging": {"use_wandb": True, "project_name": "p", "run_name": "r", "log_every": 5}}]}},
                   (False, True, "p", "r")),
    "OneTrainer": ({"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "tensorboard": True,
                   "epochs": 3}, (True, False, "inweave", None)),
}  # fmt: skip


@pytest.mark.parametrize("case", WANDB)
def test_where_a_run_is_shown_is_imported(case: str, tmp_path: Path) -> None:
    settings, expected = WANDB[case]
    if case.startswith("kohya"):
        settings = {"network_dim": 4, "train_data_dir": "x", **settings}
    simple = {"optimizer": "adamw", "lr_scheduler": "constant"} if case.startswith("Simple") else {}
    path = write_text(tmp_path, json.dumps({**settings, **simple}), "run.json")
    c = import_config(path, dataset="x").config
    assert (c.tensorboard, c.wandb, c.wandb_project, c.wandb_run_name) == expected
    assert "a-secret" not in c.to_toml()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_one_of_two_text_encoders_is_trained(first: bool, second: bool, tmp_path: Path) -> None:
    rates = [5e-5 * first, 2e-5 * second]
    kohya = {"script": "sdxl_train_network.py", "network_module": "networks.lora", "network_dim": 4,
             "train_data_dir": "x", "text_encoder_lr": rates, "learning_rate": 1e-4}  # fmt: skip
    one = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "epochs": 3,
           "text_encoder": {"train": first, "learning_rate": rates[0] or None},
           "text_encoder_2": {"train": second, "learning_rate": rates[1] or None}}  # fmt: skip
    for settings in (kohya, one):
        result = import_config(write_text(tmp_path, json.dumps(settings), "run.json"), dataset="x")
        c = result.config
        assert (c.train_text_encoders, c.text_encoder_learning_rate) == (True, max(rates))
        assert [(rule.pattern, rule.skip) for rule in c.rules] == [(r"^te2\." if first else r"^te1\.", True)]
        assert result.no_equivalent == []


def test_the_report_begins_with_what_changes_training_and_counts_the_rest(tmp_path: Path) -> None:
    """A OneTrainer file of hundreds of settings is a handful of lines; nothing is lost with --verbose."""
    result = imported(tmp_path, ONE_TRAINER, without=["perturbation_noise_weight"])
    lines = result.report()
    assert len(lines) <= 12 and "translated" in lines[0]
    kinds = [line.partition(":")[0] for line in lines[1:-1]]
    assert kinds == ["no equivalent"] * (len(kinds) - 1) + ["differs"]
    assert re.fullmatch(r"\d+ defaults written, \d+ notes, \d+ settings off or empty: --verbose lists them", lines[-1])
    everything = "\n".join(result.report(verbose=True))
    for name in (*result.defaults, *result.unset, *(note.partition(":")[0] for note in result.notes)):
        assert name in everything
    assert not any("--verbose" in line for line in result.report(verbose=True))


def test_settings_with_one_reason_share_a_line(tmp_path: Path) -> None:
    result = toolkit(tmp_path, model={**TOOLKIT["model"], "quantize": True, "low_vram": True})
    (line,) = [line for line in result.report() if "set vram" in line]
    assert line.startswith("no equivalent: model.quantize, model.low_vram: set vram")
