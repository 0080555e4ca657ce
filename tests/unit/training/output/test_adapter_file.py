"""The file of a finished run: verified against what was trained, and never lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inweave.errors import ConfigError, TargetError
from inweave.exchange.check import check
from inweave.models.model import file_index
from inweave.training.adapters.attach import collect_adapters
from inweave.training.loop import Run
from inweave.training.output.adapter_file import cast, save_adapter, verify
from tests.unit.training.image_sets import fresh_model, make_set, shared_model, task_on
from tests.unit.training.tiny import tiny


def run_on(variant: str, folder: Path, **settings: Any) -> Run:
    model = fresh_model(variant)
    task = task_on(make_set(folder / "set"), model=model, steps=1, output=str(folder / "out"), **settings)
    return Run(task, model, file_index(model), task.config)


@pytest.mark.parametrize("dialect", ["kohya", "diffusers"])
@pytest.mark.parametrize(
    ("variant", "targets", "module"),
    [
        ("sd3.5-medium", "all", "norm1_context.linear"),
        ("flux1-dev", ["norm_out.linear"], "norm_out.linear"),
        ("sd3-medium", ["norm_out.linear", "attn.to_q"], "norm_out.linear"),
    ],
)
def test_a_layer_whose_file_has_its_halves_in_the_other_order_is_written(
    variant: str, targets: str | list[str], module: str, dialect: str, tmp_path: Path
) -> None:
    run = run_on(variant, tmp_path, targets=targets, dialect=dialect)
    assert any(name.endswith(f"{module}.down") for name in run.trainable.parameters)
    path = run.train().path
    verdict = check(path, file_index(shared_model(variant)))
    assert verdict.ok and verdict.report.placed == verdict.report.tensors > 0


def test_halves_that_were_not_exchanged_do_not_pass(tmp_path: Path) -> None:
    run = run_on("flux1-dev", tmp_path, targets=["norm_out.linear"])
    path = run.train().path
    expected = cast(collect_adapters(run.task.networks), torch.float32)
    verify(path, run.index, expected)
    tensors = load_file(path)
    name = next(key for key in tensors if "final_layer" in key and "lora_up" in key)
    tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    save_file(tensors, path)
    with pytest.raises(TargetError, match="was not written as it was trained"):
        verify(path, run.index, expected)


def poisoned(run: Run) -> None:
    next(iter(run.trainable.parameters.values())).data.view(-1)[0] = float("nan")


@pytest.mark.parametrize("dialect", ["peft", "candle"])
def test_what_was_trained_is_kept_whatever_the_check_says(dialect: str, tmp_path: Path) -> None:
    run = tiny(tmp_path)
    config = run.config.model_copy(update={"dialect": "peft"})
    path = Path(config.output) / "t.safetensors"
    index = run.index
    if dialect == "candle":  # a base that has none of the trained modules: nothing can be written in any dialect
        index = replace(index, components={})
    else:
        poisoned(run)
    with pytest.raises(TargetError, match=r"what was trained is in .*t\.unverified") as raised:
        save_adapter(collect_adapters(run.task.networks), path, config, index, {"a": "b"})
    unverified = next(path.parent.glob("*unverified*"))
    assert str(unverified) in str(raised.value)
    tensors = load_file(unverified if unverified.is_file() else unverified / "adapter_model.safetensors")
    assert len(tensors) == len(run.trainable.parameters)
    assert not [each.name for each in path.parent.iterdir() if ".new" in each.name]


@pytest.mark.parametrize(("variant", "network"), [("flux1-dev", "loha"), ("sd3-medium", "lokr")])
def test_a_network_that_kohya_cannot_name_is_written_in_a_dialect_that_can(
    variant: str, network: str, tmp_path: Path
) -> None:
    run = run_on(variant, tmp_path, network=network, targets="attention")
    assert run.config.dialect == "onetrainer"
    assert any("onetrainer" in text and "kohya" in text for _, text in run.notes)
    verdict = check(run.train().path, file_index(shared_model(variant)))
    assert verdict.ok and verdict.report.placed == verdict.report.tensors > 0


def test_a_dialect_that_was_chosen_and_cannot_hold_the_network_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written as \"kohya\".*set dialect = \"onetrainer\""):
        run_on("flux1-dev", tmp_path, network="loha", targets="attention", dialect="kohya")


def test_a_run_says_what_other_programs_make_of_its_dora(tmp_path: Path) -> None:
    run = run_on("sd1.5", tmp_path, network="dora", targets=["attn1.to_q"])
    assert run.config.dialect == "kohya" and any("DoRA" in text for event, text in run.notes if event == "output")
