"""Optimizers of other trainers, in every spelling of theirs: ours with their library's defaults, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.optimizer_names import our_optimizer
from inweave.training.importers.detect import import_config
from tests.unit.training.importers.other_trainers import write_text

#: theirs -> ours; None: another algorithm, refused
NAMES: dict[str, dict[str, str | None]] = {
    "kohya": {
        "AdamW": "adamw", "AdamW8bit": "adamw8bit", "PagedAdamW": "adamw", "PagedAdamW8bit": "adamw8bit",
        "PagedAdamW32bit": "adamw",
        "Lion": "lion", "Lion8bit": "lion", "PagedLion8bit": "lion", "SGDNesterov": "torch.optim.SGD",
        "SGDNesterov8bit": "torch.optim.SGD", "DAdaptation": "dadapt_adam", "DAdaptAdam": "dadapt_adam",
        "DAdaptAdaGrad": "dadapt_adagrad", "DAdaptAdan": "dadapt_adan", "DAdaptLion": "dadapt_lion",
        "DAdaptSGD": "dadapt_sgd",
        "DAdaptAdanIP": None, "DAdaptAdamPreprint": None, "AdaFactor": "adafactor", "Prodigy": "prodigy",
        "AdamWScheduleFree": "schedulefree", "RAdamScheduleFree": None, "SGDScheduleFree": None, "CAME": "came",
        "pytorch_optimizer.CAME": "came", "lion_pytorch.Lion": "lion", "bitsandbytes.optim.AdamW8bit": "adamw8bit",
        "bitsandbytes.optim.AdEMAMix8bit": None, "prodigyplus.ProdigyPlusScheduleFree": None,
        **{f"torch.optim.{name}": f"torch.optim.{name}"
           for name in ("Adam", "RAdam", "NAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "SGD",
                        "Muon")},
        "torch.optim.AdamW": "adamw", "torch.optim.LBFGS": None,
    },
    "OneTrainer": {
        "ADAMW": "adamw", "ADAMW_8BIT": "adamw8bit", "ADAM": "torch.optim.Adam", "ADAM_8BIT": "torch.optim.Adam",
        "ADAGRAD": "torch.optim.Adagrad", "ADAGRAD_8BIT": "torch.optim.Adagrad", "RMSPROP": "torch.optim.RMSprop",
        "RMSPROP_8BIT": "torch.optim.RMSprop", "SGD": "torch.optim.SGD", "SGD_8BIT": "torch.optim.SGD", "LION": "lion",
        "LION_8BIT": "lion", "CAME": "came", "CAME_8BIT": "came", "ADAFACTOR": "adafactor", "PRODIGY": "prodigy",
        "SCHEDULE_FREE_ADAMW": "schedulefree", "DADAPT_ADAM": "dadapt_adam", "DADAPT_ADA_GRAD": "dadapt_adagrad",
        "DADAPT_ADAN": "dadapt_adan", "DADAPT_LION": "dadapt_lion", "DADAPT_SGD": "dadapt_sgd", "LAMB": None,
        "LARS": None,
        "ADOPT": None, "PRODIGY_PLUS_SCHEDULE_FREE": None, "SCHEDULE_FREE_SGD": None, "MUON": None, "TIGER": None,
        "YOGI": None,
    },
    "ai-toolkit": {
        "adamw": "adamw", "adamw8bit": "adamw8bit", "adam": "torch.optim.Adam", "adam8bit": "torch.optim.Adam",
        "lion": "lion", "lion8bit": "lion", "prodigy": "prodigy", "prodigyopt": "prodigy", "prodigy8bit": "prodigy",
        "dadaptation": "dadapt_adam", "adagrad": "torch.optim.Adagrad", "adafactor": "adafactor", "automagic": None,
    },
    "SimpleTuner": {
        "adamw_bf16": "adamw", "ao-adamw8bit": "adamw8bit", "adamw_schedulefree": "schedulefree", "bnb-adamw": "adamw",
        "bnb-adamw8bit": "adamw8bit", "bnb-adamw8bit-paged": "adamw8bit", "bnb-lion8bit": "lion",
        "bnb-lion-paged": "lion",
        "bnb-adam": "torch.optim.Adam", "bnb-adagrad8bit": "torch.optim.Adagrad", "prodigy": "prodigy",
        "dadaptation": "dadapt_adam", "soap": None, "optimi-ranger": None, "bnb-ademamix": None, "ao-adamw4bit": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("trainer", NAMES)
def test_every_name_in_any_case(trainer: str) -> None:
    for theirs, ours in NAMES[trainer].items():
        assert [our_optimizer(each) for each in (theirs, theirs.lower(), theirs.upper())] == [ours] * 3, theirs


def imported(folder: Path, **settings: Any) -> Any:
    base = {"train_data_dir": "x", "network_dim": 4, "learning_rate": 1e-3, "max_train_steps": 10}
    return import_config(write_text(folder, json.dumps({**base, **settings}), "run.json")).config


@pytest.mark.parametrize(
    ("theirs", "decay", "betas", "epsilon"),
    [
        ("AdamW", 0.01, (0.9, 0.999), 1e-8), ("Lion", 0.0, (0.9, 0.99), None),
        ("torch.optim.Adam", 0.0, (0.9, 0.999), 1e-8),
        ("torch.optim.Adagrad", 0.0, None, 1e-10), ("DAdaptAdan", 0.02, (0.98, 0.92), 1e-8),
        ("SGDNesterov", 0.0, None, None),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_library(
    theirs: str, decay: float, betas: Any, epsilon: float | None, tmp_path: Path
) -> None:
    c = imported(tmp_path, optimizer_type=theirs)
    assert c.weight_decay == decay
    assert betas is None or c.betas == betas
    assert epsilon is None or c.epsilon == epsilon


def test_nesterov_is_more_than_sgd(tmp_path: Path) -> None:
    c = imported(tmp_path, optimizer_type="SGDNesterov")
    assert (c.optimizer, c.optimizer_args) == ("torch.optim.SGD", {"nesterov": True, "momentum": 0.9})
    c = imported(tmp_path, optimizer_type="sgdnesterov8bit", optimizer_args=["momentum=0.8", "weight_decay=0.1"])
    assert (c.optimizer_args, c.weight_decay) == ({"nesterov": True, "momentum": 0.8}, 0.1)
    assert imported(tmp_path, optimizer_type="torch.optim.SGD").optimizer_args == {}
    with pytest.raises(ConfigError, match=r"'SGDScheduleFree' is not supported"):
        imported(tmp_path, optimizer_type="SGDScheduleFree")


def test_options_that_onetrainer_writes(tmp_path: Path) -> None:
    base = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "m", "epochs": 2,
            "text_encoder": {"train": False}, "concepts": [{"path": "x"}]}  # fmt: skip
    options = {"optimizer": "SGD", "momentum": 0.7, "nesterov": True, "dampening": 0.0, "weight_decay": 0.0, "d0": None}
    c = import_config(write_text(tmp_path, json.dumps({**base, "optimizer": options}))).config
    assert c.optimizer_args == {"momentum": 0.7, "nesterov": True, "dampening": 0.0}
    options = {"optimizer": "DADAPT_ADAM", "d0": 1e-6, "growth_rate": float("inf"), "decouple": True, "log_every": 0}
    c = import_config(write_text(tmp_path, json.dumps({**base, "optimizer": options, "learning_rate": 1}))).config
    assert (c.optimizer, c.optimizer_args) == ("dadapt_adam", {"d0": 1e-6, "decouple": True})
