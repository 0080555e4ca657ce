"""Sample prompts as kohya's scripts accept them, and the images they produce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave.errors import ConfigError
from inweave.generate.record import read_record
from inweave.models.model import load_model
from inweave.training.output.sample_prompts import read_line, sample_requests
from inweave.training.output.samples import Sampler
from tests.unit.training.tiny import config


def requested(tmp_path: Path, *prompts: str, **settings: Any) -> list[dict[str, Any]]:
    """The requests that would be generated, without the model's defaults."""
    requests = sample_requests(config(tmp_path, sample_prompts=prompts, **settings))
    fields = ("prompt", "negative_prompt", "width", "height", "seed", "guidance", "steps", "sampler")
    return [
        {field: v for field in fields if (v := getattr(request, field)) not in (None, "")} for _, request in requests
    ]


def refused(tmp_path: Path, *prompts: str, **settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sample_requests(config(tmp_path, sample_prompts=prompts, **settings))
    return [*map(str, caught.value.problems)]


def test_a_line_takes_kohyas_flags(tmp_path: Path) -> None:
    line = "a cat, (sitting:1.2) --n blurry, dark --w 512 --h 768 --d 42 --l 7.5 --s 28 --ss euler_a"
    assert requested(tmp_path, line) == [{
        "prompt": "a cat, (sitting:1.2)", "negative_prompt": "blurry, dark", "width": 512, "height": 768, "seed": 42,
        "guidance": 7.5, "steps": 28, "sampler": "euler_ancestral",
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "text", "flags"),
    [
        ("a well--lit room", "a well--lit room", {}),
        ("day -- night --s 3", "day -- night", {"steps": 3}),
        ("a --- b --5 c", "a --- b --5 c", {}),
        ("cat  --S   3\t--N a  b ", "cat", {"steps": 3, "negative_prompt": "a  b"}),
        ("cat --n not a well--lit one", "cat", {"negative_prompt": "not a well--lit one"}),
        ("cat --l .5", "cat", {"guidance": 0.5}),
        ("cat --l 7. --d 0", "cat", {"guidance": 7.0, "seed": 0}),
    ],
)
def test_where_a_flag_begins(line: str, text: str, flags: dict[str, Any]) -> None:
    fields = {field: value for field, (_, value) in read_line(line).items()}
    assert fields == {"prompt": text, **flags}


def test_a_line_overrides_the_configuration_and_that_the_model(tmp_path: Path) -> None:
    lines = ("cat", "dog --d 7", "fox --s 3 --l 2")
    own = {"seed": 1, "steps": 9, "guidance": 5.0}
    assert requested(tmp_path, *lines, sample_seed=1, sample_steps=9, sample_guidance=5.0) == [
        {"prompt": "cat", **own},
        {"prompt": "dog", **own, "seed": 7},
        {"prompt": "fox", **own, "steps": 3, "guidance": 2.0},
    ]
    assert requested(tmp_path, "cat") == [{"prompt": "cat", "seed": 42}]


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.TXT"
    file.write_bytes("\ufeff# what to look at\n\n  a cat --d 3\r\n\t# not this\na #1 dog\n".encode())
    assert requested(tmp_path, str(file), "a fox") == [
        {"prompt": "a cat", "seed": 3}, {"prompt": "a #1 dog", "seed": 42}, {"prompt": "a fox", "seed": 42},
    ]  # fmt: skip


def test_kohyas_tables(tmp_path: Path) -> None:
    toml, listed = tmp_path / "p.toml", tmp_path / "p.json"
    toml.write_text(
        '[prompt]\nwidth = 512\nscale = 7\n[[prompt.subset]]\nprompt = "a cat"\nwidth = 768\nseed = 3\n'
        '[[prompt.subset]]\nprompt = "a dog"\nnegative_prompt = "blurry"\nsample_steps = 5\n'
        'sample_sampler = "euler_a"\n'
    )
    listed.write_text(json.dumps([{"prompt": "a cat", "scale": 2.5}, "a dog --w 512"]))
    assert requested(tmp_path, str(toml)) == [
        {"prompt": "a cat", "width": 768, "seed": 3, "guidance": 7},
        {"prompt": "a dog", "negative_prompt": "blurry", "width": 512, "seed": 42, "guidance": 7, "steps": 5,
         "sampler": "euler_ancestral"},
    ]  # fmt: skip
    assert requested(tmp_path, str(listed)) == [
        {"prompt": "a cat", "seed": 42, "guidance": 2.5}, {"prompt": "a dog", "width": 512, "seed": 42},
    ]  # fmt: skip


def test_a_prompt_may_be_empty_wherever_it_is_written(tmp_path: Path) -> None:
    lines, tables = tmp_path / "prompts.txt", tmp_path / "prompts.json"
    lines.write_text("--n blurry\n")
    tables.write_text('[{"seed": 3}, {"prompt": "", "seed": 4}, ""]')
    requests = [request for _, request in sample_requests(config(tmp_path, sample_prompts=(str(lines), str(tables))))]
    assert [(request.prompt, request.negative_prompt, request.seed) for request in requests] == [
        ("", "blurry", 42), ("", "", 3), ("", "", 4), ("", "", 42),
    ]  # fmt: skip


def test_reference_images_of_a_prompt_are_in_order(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.json"
    lines.write_text('["a cat --ci b.png --w 64 --ci a.png", {"prompt": "", "control_image_path": ["c.png", "a.png"]}]')
    requests = [request for _, request in sample_requests(config(tmp_path, sample_prompts=(str(lines),)))]
    assert [request.references for request in requests] == [("b.png", "a.png"), ("c.png", "a.png")]


def test_every_problem_of_a_file_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(
        "# good\na cat\na dog --q 3 --w wide\n--n blurry\na cat --w 500 --w 512\na fox --w 500 --s 0 --d -1\n"
    )
    problems = [problem.removeprefix(f"sample_prompts: {file}:") for problem in refused(tmp_path, str(file))]
    known = "--n (negative_prompt), --w (width), --h (height), --d (seed), --l (guidance), --s (steps), --ss (sampler)"
    known += ", --ci (references)"
    assert problems == [
        f"3: --q: unknown flag; known flags are {known}",
        "3: --w (width): expected a whole number of 0 or more, got 'wide'",
        "5: --w (width): appears twice",
        "6: --d (seed): expected a whole number of 0 or more, got '-1'",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cat --w 500", "--w (width): should be a multiple of 8, got 500"),
        ("cat --s 0", "--s (steps): should be greater than or equal to 1, got 0"),
        ("cat --l 31", "--l (guidance): should be less than or equal to 30, got 31.0"),
        ("cat --l 7,5", "--l (guidance): expected a number of 0 or more, got '7,5'"),
        ("cat --w 512 wide", "--w (width): expected a whole number of 0 or more, got '512 wide'"),
        ("cat --n", "--n (negative_prompt): expected text, got ''"),
        ("cat --ss magic", "--ss (sampler): 'magic' is unknown"),
        ("cat --no-background", "--no-background: unknown flag"),
        ("cat <lora:other:1>", "<lora:...>: a sample shows the adapter being trained"),
        ("nowhere.txt", "nowhere.txt: no such file; a prompt itself cannot end in .txt, .toml, .json"),
    ],
)
def test_invalid_lines_are_refused(line: str, message: str, tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, line)
    assert message in problem and problem.startswith("sample_prompts: ")


def test_a_value_of_the_configuration_is_named_as_it_is_there(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "cat", sample_steps=500)
    assert problem.startswith("sample_prompts: prompt 1: sample_steps: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "# nothing\n\n", "contains no prompt"),
        ("a.json", "[]", "contains no prompt"),
        ("a.json", '{"prompt": "cat"}', "expected a list of prompts, each a table or a line"),
        ("a.json", "[", "not valid JSON"),
        ("a.json", '[{"prompt": "cat", "steps": 3}]', "prompt 1: steps: unknown key; known keys are prompt, "),
        ("a.json", '[{"prompt": "cat", "width": true}]', "width: expected a whole number of 0 or more, got True"),
        ("a.json", '[{"prompt": 3}]', "prompt: expected text, got 3"),
        ("a.toml", 'prompt = "cat"', "expected a [prompt] table with one [[prompt.subset]] per prompt"),
        ("a.toml", "prompt =", "is not valid TOML"),
    ],
)
def test_files_that_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (problem,) = refused(tmp_path, str(tmp_path / name))
    assert message in problem and str(tmp_path / name) in problem


def test_samples_follow_their_prompt_lines(tmp_path: Path) -> None:
    model = load_model("inweave/emoji", device="cpu")
    lines = ("a red apple --w 64 --h 128 --d 7 --s 2 --l 3 --n blue", "a cat", "a cat --d 42")
    chosen = config(tmp_path, sample_prompts=lines, sample_steps=1)
    sampler = Sampler(model, chosen)
    assert not (tmp_path / "samples").exists()
    paths = [sample.path for sample in sampler(20)]
    assert [path.name for path in paths] == [f"t-000020-{number}.png" for number in range(3)]
    first, second, third = (Image.open(path) for path in paths)
    assert first.size == (64, 128) and second.size == (model.size, model.size)
    record = read_record(paths[0])["config"]
    assert (record["seed"], record["steps"], record["guidance"], record["negative_prompt"]) == (7, 2, 3.0, "blue")
    assert second.tobytes() == third.tobytes(), "42 is the default seed"
    assert Sampler(model, config(tmp_path / "other", sample_prompts=lines[1:2], sample_steps=1), writes=False)(20) == []
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigError, match="sample_prompts: prompt 2: schedule: ddpm has no karras schedule"):
        Sampler(model, config(tmp_path, sample_prompts=("cat", "cat --ss ddpm karras")))
