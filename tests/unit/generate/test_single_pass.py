"""One request takes one pass: prompts are parsed, the request is prepared and LoRAs are looked up once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.generate import prompt as prompts
from inweave.generate.axes import Axis
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.find import LoraFinder
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.sweep import sweep

PROMPT = "a cat face <lora:ink:0.4>"
SETTINGS: dict[str, Any] = {"negative_prompt": "a dog", "steps": 1, "seed": 7, "width": 64, "height": 64}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Any]]:
    """How often each text was parsed, each LoRA was looked up, and a request was prepared."""
    counter: Counter[Any] = Counter()

    def amount(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counter[key(*arguments)] += 1
            return function(*arguments, **options)

        return call

    parse = prompts.parse
    counting = amount(parse, lambda text, *_: text)
    for name, module in list(sys.modules.items()):
        if name.startswith("inweave.") and getattr(module, "parse", None) is parse:
            monkeypatch.setattr(module, "parse", counting)
    monkeypatch.setattr(LoraFinder, "find", amount(LoraFinder.find, lambda _, choice: choice))
    monkeypatch.setattr(Pipeline, "prepare", amount(Pipeline.prepare, lambda *_: "prepared"))
    yield counter


PIXEL, INK = LoraChoice(name="pixel", strength=0.6), LoraChoice(name="ink", te=0.4, unet=0.4)
ONCE = {PROMPT: 1, "a dog": 1, PIXEL: 1, INK: 1, "prepared": 1}


@pytest.mark.parametrize("name", ["cat.png", "cat.jpg", "{prompt}-{seed}.webp"])
def test_the_command_line_does_everything_once(name: str, tmp_path: Path, calls: Counter[Any]) -> None:
    options = ["--lora", "pixel:0.6", "-n", "a dog", "--steps", "1", "-W", "64", "-H", "64", "--device", "cpu"]
    result = CliRunner().invoke(app, ["generate", PROMPT, *options, "-o", str(tmp_path / name)])
    assert result.exit_code == 0, result.output
    assert calls == ONCE
    assert len(list(tmp_path.iterdir())) == 1


def test_a_pipeline_does_everything_once(calls: Counter[Any], tmp_path: Path) -> None:
    pipe = pipeline("inweave/emoji", device="cpu")
    result = pipe(PROMPT, loras=["pixel:0.6"], **SETTINGS)
    for name in ("cat.png", "cat.jpg"):
        result.save(tmp_path / name)
    assert calls == ONCE


def test_a_configuration_keeps_its_parsed_prompts(calls: Counter[Any]) -> None:
    config = GenerateConfig(prompt=PROMPT, **SETTINGS)
    copy = config.model_copy(update={"seed": 8}, check=False)
    assert [choice.name for choice in config.tagged_loras()] == ["ink"] and copy.prompts is config.prompts
    assert calls == {PROMPT: 1, "a dog": 1}
    changed = config.model_copy(update={"prompt": "a rocket"})
    assert changed.prompts[0].text == "a rocket" and changed.tagged_loras() == () and changed != config
    assert config == GenerateConfig(**config.model_dump()) and "prompts" not in config.model_dump()


def test_every_cell_of_a_sweep_is_prepared_once(calls: Counter[Any]) -> None:
    pipe = pipeline("inweave/emoji", device="cpu")
    config = GenerateConfig(prompt=PROMPT, **SETTINGS)
    made = sweep(pipe, config, [Axis("seed", (1, 2, 3))])
    assert len(made.results[0]) == 3
    assert calls["prepared"] == 4  # the request, for the record of the sheet, and its cells
