"""Alphas that a file leaves open: assumed aloud, or supplied by the caller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import inweave
from inweave.cli.app import app
from inweave.errors import ConfigError
from inweave.formats.alphas import Alphas
from inweave.formats.files import write_file
from inweave.formats.read import read
from inweave.generate.config import LoraChoice
from inweave.generate.find import LoraFinder, with_alpha
from inweave.models import embedded
from tests.support import random

UNET = "base_model.model.down_blocks.0.attentions.0.transformer_blocks.0"
PAIRS = {f"{UNET}.attn1.to_q": (8, 320, 320), f"{UNET}.attn2.to_k": (4, 320, 768)}
SDXL = "sd1.5"


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    tensors = {}
    for number, (module, (rank, out, into)) in enumerate(PAIRS.items()):
        tensors[f"{module}.lora_A.weight"] = random(number, rank, into)
        tensors[f"{module}.lora_B.weight"] = random(number + 9, out, rank)
    return write_file(tmp_path / "lone.safetensors", tensors)


def scales(adapter: inweave.Adapter) -> list[float]:
    return [entry.factors.scale for entry in adapter]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_the_assumption_is_reported_everywhere(lone: Path, tmp_path: Path) -> None:
    adapter = inweave.load(lone)
    assert scales(adapter) == [1.0, 1.0]
    assert len(adapter.assumed_alphas) == 2
    assert "adapter_config.json" in adapter.warnings[0]
    verdict = inweave.check(adapter, SDXL)
    assert verdict.ok and verdict.assumed_alphas == adapter.assumed_alphas
    assert any("alpha = rank" in warning for warning in verdict.report.warnings)
    assert any("alpha = rank" in warning for warning in inweave.resolve(adapter, SDXL).report.warnings)
    done = inweave.convert(lone, tmp_path / "out.safetensors", to="kohya", base=SDXL)
    assert done.assumed_alphas and "alpha = rank" in done.warnings[0]
    for command in (
        ("check", lone, "--base", SDXL),
        ("inspect", lone),
        ("convert", lone, tmp_path / "o.safetensors", "--to", "kohya", "--base", SDXL, "--force"),
    ):
        code, text = run(*command)
        assert code == 0 and "alpha = rank" in text, text
        document = json.loads(run(*command, "--json")[1])
        assert document["assumed_alphas"] == 2
        assert any("alpha = rank" in warning for warning in document["warnings"])


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (4, [0.5, 1.0]),
        ({8: 4, 4: 2}, [0.5, 0.5]),
        ({"8": 4.0, "*": 1.0}, [0.5, 0.25]),
        ({"to_q": 2, 8: 4, 4: 2}, [0.25, 0.5]),
        ({r"attn\d\.to_k": 8}, [1.0, 2.0]),
    ],
)
def test_a_supplied_alpha_scales(lone: Path, alpha: Alphas, expected: list[float]) -> None:
    adapter = inweave.load(lone, alpha=alpha)
    assert scales(adapter) == expected
    assert len(adapter.assumed_alphas) == (1 if len(expected) > 1 and alpha == {r"attn\d\.to_k": 8} else 0)
    assert bool(adapter.warnings) == bool(adapter.assumed_alphas)


def test_options_supply_it(lone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run("convert", lone, out, "--to", "kohya", "--base", SDXL, "--alpha", 2, "--rank-alpha", "8=4")[0] == 0
    assert sorted(scales(inweave.load(out))) == [0.5, 0.5]
    document = json.loads(run("inspect", lone, "--rank-alpha", "to_q=16", "--alpha", 4, "--json")[1])
    assert document["scales"] == {"1": 1, "2": 1}
    assert "assumed_alphas" not in document
    code, text = run("check", lone, "--base", SDXL, "--alpha", 2)
    assert code == 0 and "alpha = rank" not in text


@pytest.mark.parametrize(
    "alpha", [0, -1, float("nan"), float("inf"), "x", True, {3: 1}, {"nosuch": 1}, {"": 1}, {8: None}, 10**400]
)
def test_a_wrong_alpha_is_an_error(lone: Path, alpha: object) -> None:
    with pytest.raises(ConfigError):
        inweave.load(lone, alpha=alpha)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["8", "8=", "=3", "8=x", "8=nan"])
def test_a_wrong_option_is_an_error(lone: Path, text: str) -> None:
    assert run("inspect", lone, "--rank-alpha", text)[0] == 2


def test_an_alpha_that_nothing_needs_is_an_error(lone: Path, tmp_path: Path) -> None:
    inweave.convert(lone, tmp_path / "k.safetensors", to="kohya", base=SDXL, alpha=4)
    with pytest.raises(ConfigError, match="states its own"):
        inweave.load(tmp_path / "k.safetensors", alpha=4)
    inweave.convert(lone, tmp_path / "peft", to="peft", base=SDXL, alpha=4)
    assert inweave.load(tmp_path / "peft").assumed_alphas == ()
    with pytest.raises(ConfigError, match="states its own"):
        inweave.check(tmp_path / "peft", SDXL, alpha=4)


def test_formats_without_alpha_by_convention_are_not_warned_about(tmp_path: Path) -> None:
    tensors = {"lora_unet_x.lora_down.weight": random(1, 4, 8), "lora_unet_x.lora_up.weight": random(2, 8, 4),
               "unet.y.lora_A.weight": random(1, 4, 8), "unet.y.lora_B.weight": random(2, 8, 4)}  # fmt: skip
    adapter = inweave.load(write_file(tmp_path / "a.safetensors", tensors))
    assert adapter.assumed_alphas == () and adapter.warnings == ()
    assert scales(inweave.load(tmp_path / "a.safetensors", alpha=2)) == [0.5, 0.5]


def test_the_bias_of_a_lora_follows_its_alpha(tmp_path: Path) -> None:
    tensors = {
        f"{UNET}.attn1.to_q.lora_A.weight": random(1, 8, 320),
        f"{UNET}.attn1.to_q.lora_B.weight": random(2, 320, 8),
        f"{UNET}.attn1.to_q.lora_B.bias": random(3, 320),
    }
    path = write_file(tmp_path / "a.safetensors", tensors)
    assert scales(inweave.load(path, alpha=2)) == [0.25, 0.25]


def test_baking_and_generating_say_it_and_take_it(tmp_path: Path) -> None:
    """An embedded LoRA as PEFT stores it, without its configuration."""
    base = embedded.folder()
    inweave.convert(embedded.loras()["pixel"], tmp_path / "peft", to="peft", base=base)
    lone = (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "pixel.safetensors")
    baked = inweave.bake(base, [str(lone)], tmp_path / "merged")
    assert any("alpha = rank" in warning for warning in baked.warnings)
    halved = inweave.bake(base, [str(lone)], tmp_path / "halved", alpha=4)
    assert halved.warnings == []
    with pytest.raises(ConfigError, match="states its own"):
        inweave.bake(base, [embedded.loras()["pixel"]], tmp_path / "none", alpha=4)

    pipe = inweave.pipeline("inweave/emoji", device="cpu")
    settings: dict[str, Any] = {"steps": 1, "seed": 1, "width": 64, "height": 64}
    assumed = pipe("an apple", loras=[{"path": str(lone)}], **settings)
    assert any("alpha = rank" in warning for warning in assumed.warnings)
    supplied = pipe("an apple", loras=[{"path": str(lone), "alpha": 4}], **settings)
    half = pipe("an apple", loras=[f"{lone}:0.5"], **settings)
    assert not supplied.warnings
    assert supplied.records[0]["config"]["loras"][0]["alpha"] == 4
    assert supplied.images[0].tobytes() == half.images[0].tobytes() != assumed.images[0].tobytes()
    choices = [LoraChoice(path=str(lone)), LoraChoice(name="ink")]
    assert [choice.alpha for choice in with_alpha(choices, LoraFinder(), 4)] == [4, None]
    with pytest.raises(ConfigError, match="states its own"):
        with_alpha(choices[1:], LoraFinder(), 4)


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({"lora_alpha": 0}, [0.0, 0.0]),
        ({"lora_alpha": 0.0, "use_rslora": True}, [0.0, 0.0]),
        ({"lora_alpha": 4, "alpha_pattern": {"k": 0}}, [2.0, 0.0]),
        ({"lora_alpha": 0, "alpha_pattern": {r".*\.q": 6}}, [3.0, 0.0]),
    ],
)
def test_an_alpha_of_zero_in_a_configuration_is_peft_s_zero(fields: dict[str, object], scales: list[float]) -> None:
    """PEFT multiplies by it; in a file of another trainer it means alpha = rank."""
    tensors = {}
    for name in ("q", "k"):
        tensors[f"base_model.model.layers.0.{name}.lora_A.weight"] = random(1, 2, 8)
        tensors[f"base_model.model.layers.0.{name}.lora_B.weight"] = random(2, 8, 2)
    adapter = read(tensors, None, {"peft_type": "LORA", "r": 2, **fields})
    by_name = {entry.ref.name.rpartition(".")[2]: entry.factors.scale for entry in adapter}
    assert [by_name["q"], by_name["k"]] == scales
    assert any("scaled by 0 as PEFT does" in warning for warning in adapter.warnings)
