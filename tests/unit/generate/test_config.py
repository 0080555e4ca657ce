"""A request is checked whole: every limit, all problems at once, in words that name the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.generate.config import GenerateConfig, LoraChoice, parse_loras
from inweave.generate.find import LoraFinder, check_request

EDGES = [
    ("steps", 1, 150, 0, 151),
    ("guidance", 0.0, 30.0, -0.1, 30.1),
    ("width", 64, 4096, 56, 4104),
    ("height", 64, 4096, 60, 4100),
    ("seed", -1, 2**64 - 1, -2, 2**64),
    ("strength", 0.0, 1.0, -0.01, 1.01),
    ("count", 1, 100, 0, 101),
    ("clip_skip", 1, 12, 0, 13),
    ("feather", 0, 256, -1, 257),
]


@pytest.mark.parametrize(("field", "low", "high", "below", "above"), EDGES)
def test_limits_hold_at_their_edges(field: str, low: Any, high: Any, below: Any, above: Any) -> None:
    for value in (low, high):
        assert getattr(GenerateConfig(prompt="x", **{field: value}), field) == value
    wrong: list[Any] = [below, above, "many", math.nan]
    for value in wrong:
        with pytest.raises(ConfigError, match=field):
            GenerateConfig(prompt="x", **{field: value})


def test_sizes_are_multiples_of_eight() -> None:
    with pytest.raises(ConfigError, match=r"width.*multiple of 8"):
        GenerateConfig(prompt="x", width=100)


def test_all_problems_come_back_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateConfig.model_validate(
            {
                "prompt": 5,
                "steps": 0,
                "guidance": 31,
                "sampler": "eulr",
                "schedule": "x",
                "loras": ["a:nan"],
                "stepz": 3,
            }
        )
    problems = str(caught.value)
    for word in ("prompt", "steps", "guidance", "sampler", "schedule", "finite", "did you mean 'steps'"):
        assert word in problems
    assert len(caught.value.problems) == 7


def test_problems_of_files_and_fields_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_request({"prompt": "x <lora:gone:1>", "steps": 0, "loras": ["absent:0.5"]}, LoraFinder([tmp_path]))
    problems = str(caught.value)
    assert "steps" in problems and "gone" in problems and "absent" in problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pixel", {"name": "pixel", "te": 1.0, "unet": 1.0}),
        ("pixel:0.8", {"name": "pixel", "te": 0.8, "unet": 0.8}),
        ("pixel:0.2:0.9", {"name": "pixel", "te": 0.2, "unet": 0.9}),
        ("dir/a.safetensors:-1.5", {"path": "dir/a.safetensors", "te": -1.5, "unet": -1.5}),
        ("C:\\a.safetensors", {"path": "C:\\a.safetensors", "te": 1.0, "unet": 1.0}),
        ("a:b:0.5", {"name": "a:b", "te": 0.5, "unet": 0.5}),
    ],
)
def test_choices_are_read_from_text(text: str, expected: dict[str, object]) -> None:
    choice = LoraChoice.parse(text)
    fields = {"path": choice.path, "name": choice.name, **choice.strengths()}
    assert {key: value for key, value in fields.items() if value is not None} == expected


def test_a_choice_needs_one_place() -> None:
    for wrong in ({}, {"name": "a", "path": "b"}, {"name": "a", "strength": math.inf}, {"nam": "a"}):
        with pytest.raises(ConfigError):
            parse_loras([wrong])


@pytest.mark.parametrize(
    ("alias", "sampler", "schedule"),
    [
        ("Euler a", "euler_ancestral", "simple"),
        ("DPM++ 2M Karras", "dpm_solver_multistep", "karras"),
        ("dpmpp", "dpm_solver_multistep", "simple"),
        ("UniPC", "uni_pc", "simple"),
        ("DDIM", "ddim", "simple"),
    ],
)
def test_samplers_by_the_names_others_use(alias: str, sampler: str, schedule: str) -> None:
    config = GenerateConfig(prompt="x", sampler=alias)
    assert (config.sampler, config.schedule) == (sampler, schedule)


def test_the_constructor_raises_our_error_with_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(prompt="x", steps=0, width=100)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="one of path, name and hash"):
        LoraChoice(strength=1.0)


def test_fields_under_the_names_of_other_programs() -> None:
    make: Any = GenerateConfig
    config = make(prompt="a", guidance_scale=5.0, negative_prompt=None, seed=None, loras=None)
    assert (config.guidance, config.negative_prompt, config.loras) == (5.0, "", ())
    assert GenerateConfig.model_validate_json('{"prompt": "a", "guidance_scale": null}').guidance is None
    assert make(prompt="a", guidance=5.0, guidance_scale=5.0).guidance == 5.0
    with pytest.raises(ConfigError, match="guidance_scale"):
        make(prompt="a", guidance=4.0, guidance_scale=5.0)
    with pytest.raises(ConfigError, match="guidance"):
        make(prompt="a", guidance_scale=31)


def test_a_prompt_may_be_empty() -> None:
    for prompt in ("", "  ", "<lora:pixel:1>"):
        assert GenerateConfig(prompt=prompt).prompts[0].pieces == ()
