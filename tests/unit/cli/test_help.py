"""First contact: help, version, misspelled names, files of another kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.exchange.hashes import hash_file
from inweave.models import embedded
from inweave.version import __version__

PIXEL = embedded.loras()["pixel"]


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    command = typer.main.get_command(app) if command is None else command
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield path, command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_has_an_example_and_every_option_a_default() -> None:
    for path, command in commands():
        assert "Example: inweave " in (command.help or ""), path
        for option in command.params:
            if option.param_type_name != "option":
                continue
            assert option.help, (path, option.opts)
            if not (option.required or option.is_flag or option.multiple):
                assert option.default is not None or isinstance(option.show_default, str), (path, option.opts)


def test_defaults_and_groups_are_on_the_page() -> None:
    _, page = run("generate", "--help")
    for text in ("[default: (PROMPT-SEED.png)]", "[default: (./loras)]", "Model and device", "Grids", "Example:"):
        assert text in page, text
    assert run("help", "generate")[1].replace("root help", "x").count("--negative") == 1
    assert "--examine" in run("help", "library", "scan")[1]


def test_version() -> None:
    assert f"inweave {__version__}" in run("version")[1] and __version__ in run("--version")[1]
    assert json.loads(run("version", "--json")[1])["version"] == __version__


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["generat", "x"], "'generate'"),
        (["help", "generat"], "'generate'"),
        (["help", "library", "scn"], "'scan'"),
        (["library", "lst"], "'list'"),
        (["generate", "x", "--step", "3"], "--steps"),
        (["resize", "x", "--rnk", "3"], "--rank"),
        (["generate", "x", "--lora", "pixle"], "'pixel'"),
        (["generate", "x <lora:pixle:1>"], "'pixel'"),
        (["generate", "x", "--sampler", "Eular a"], "'euler_a'"),
        (["generate", "x", "--schedule", "karas"], "'karras'"),
        (["generate", "x", "--model", "inweave/emojy"], "'inweave/emoji'"),
        (["generate", "x", "--model", "sdlx"], "'sdxl'"),
        (["check", "pixel", "--base", "sdlx"], "'sdxl'"),
        (["check", "pixle", "--base", "inweave/emoji"], "'pixel'"),
        (["inspect", "pixle"], "'pixel'"),
        (["hash", "pixle"], "'pixel'"),
        (["convert", "pixle", "o.safetensors", "--to", "peft"], "'pixel'"),
        (["resize", "pixle", "--rank", "2", "-o", "o.safetensors"], "'pixel'"),
        (["bake", "--base", "inweave/emoji", "--lora", "pixle:0.5", "-o", "o"], "'pixel'"),
        (["train", "--set", "rnk=3", "--model", "inweave/emoji", "--dataset", "inweave/pixel"], "'rank'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_gets_a_suggestion(arguments: list[str], suggestion: str, folder: Path) -> None:
    code, output = run(*arguments)
    assert code == 2 and suggestion in output, output


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--lora", "pixel:abc"],
        ["generate", "x <lora:pixel:abc>"],
        ["resize", "pixel:abc", "--rank", "2", "-o", "o.safetensors"],
        ["bake", "--base", "inweave/emoji", "--lora", "pixel:abc", "-o", "o"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_strength_that_is_not_a_number_is_reported(arguments: list[str], folder: Path) -> None:
    code, output = run(*arguments)
    assert code == 2 and "'abc'" in output and "strength" in output, output
    assert not [*folder.iterdir()]


def test_names_and_hashes_in_every_command(folder: Path) -> None:
    hashes = hash_file(PIXEL)
    assert hashes.autov3 is not None
    for reference in ("pixel", hashes.autov3):
        assert run("check", reference, "--base", "inweave/emoji")[0] == 0
        assert json.loads(run("inspect", reference, "--json")[1])["path"] == str(PIXEL)
        assert hashes.autov2 in run("hash", reference)[1]
    assert run("convert", hashes.autov2, "a.safetensors", "--to", "comfy")[0] == 0
    assert run("resize", hashes.autov3, "--rank", "1", "-o", "b.safetensors")[0] == 0
    assert run("bake", "--base", "inweave/emoji", "--lora", f"{hashes.autov2}:0.5", "-o", "c")[0] == 0
    assert "no LoRA" in run("inspect", "0123456789ab")[1]


def test_names_below_the_lora_folder_in_every_command(folder: Path) -> None:
    (folder / "loras" / "styles").mkdir(parents=True)
    shutil.copy(PIXEL, folder / "loras" / "styles" / "mine.safetensors")
    emoji, dataset = ["--model", "inweave/emoji"], ["--dataset", "inweave/pixel"]
    for reference in ("styles/mine", "styles/mine.safetensors", "mine.safetensors"):
        assert json.loads(run("inspect", reference, "--json")[1])["path"] == "loras/styles/mine.safetensors"
        assert run("hash", reference)[0] == 0
        assert run("check", reference, "--base", "inweave/emoji")[0] == 0
        assert run("convert", reference, "a.safetensors", "--to", "comfy", "--force")[0] == 0
        assert run("resize", f"{reference}:0.5", "--rank", "1", "-o", "b.safetensors", "--force")[0] == 0
        sampler = ["--sampler", "lcm", "--schedule", "karras"]  # what is refused after the LoRA was looked up
        assert "no such file" not in run("generate", "x", "--lora", f"{reference}:0.5", *sampler)[1]
    # these look it up in the same way and then work on a whole model
    assert run("bake", "--base", "inweave/emoji", "--lora", "styles/mine", "-o", "c")[0] == 0
    start = ["--set", "start_from=mine.safetensors", "--check", "--json"]
    assert (
        json.loads(run("train", *emoji, *dataset, *start)[1])["config"]["start_from"] == "loras/styles/mine.safetensors"
    )
    code, output = run("inspect", "styles/gone")
    assert code == 2 and "styles/gone: no such file" in output
    code, output = run("train", *emoji, *dataset, "--set", "start_from=mien", "--check")
    assert code == 2 and "did you mean 'mine'" in output


def test_a_model_folder_is_replaced_with_force_alone_and_another_folder_never(folder: Path) -> None:
    bake = ["bake", "--base", "inweave/emoji", "--lora", "pixel", "-o"]
    assert run(*bake, "model")[0] == 0
    (folder / "model" / "stale.txt").write_text("of the model before")
    code, output = run(*bake, "model")
    assert code == 2 and "replace it with --force" in output and "merging" not in output
    assert run(*bake, "model", "--force")[0] == 0 and not (folder / "model" / "stale.txt").exists()
    (folder / "photos").mkdir()
    (folder / "photos" / "a.txt").write_text("mine")
    code, output = run(*bake, "photos", "--force")
    assert code == 2 and "not a model folder" in output and (folder / "photos" / "a.txt").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_any_file_has_hashes_and_an_image_is_recognized(folder: Path) -> None:
    (folder / "any.bin").write_bytes(b"x" * 100)
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    shutil.copy(folder / "a.png", folder / "b.safetensors")
    for name in ("any.bin", "a.png"):
        assert run("hash", name)[0] == 0 and "sha256" in run("hash", name)[1]
    for arguments in (
        ["generate", "x", "--model", "a.png"], ["generate", "x", "--model", "b.safetensors"], ["inspect", "a.png"],
        ["bake", "--base", "a.png", "--lora", "pixel", "-o", "x.safetensors"], ["check", "pixel", "--base", "a.png"],
        ["extract", "a.png", "b.safetensors", "-o", "x.safetensors"],
        ["resize", "a.png", "--rank", "2", "-o", "x.safetensors"],
    ):  # fmt: skip
        code, output = run(*arguments)
        assert (
            code == 2
            and ": an image (PNG), not a model or an adapter; `inweave generate --from` repeats an image" in output
        ), (arguments, output)


def test_inspect_looks_into_folders_of_folders(folder: Path) -> None:
    (folder / "loras" / "styles" / "old").mkdir(parents=True)
    for name in ("a.safetensors", "styles/b.safetensors", "styles/old/c.safetensors"):
        shutil.copy(PIXEL, folder / "loras" / name)
    rows = json.loads(run("inspect", "loras", "--json")[1])
    assert [Path(row["path"]).stem for row in rows] == ["a", "b", "c"]
    assert json.loads(run("inspect", "c", "--json")[1])["path"].endswith("c.safetensors")  # a name in ./loras


def test_problems_are_reported_before_a_model_is_loaded(folder: Path) -> None:
    for arguments in (
        ["--grid", "strengt=1"], ["--grid", "seed=1", "--compare"], ["--init", "gone.png"],
        ["--sampler", "lcm", "--schedule", "karras"], ["--sampler", "Euler a Karras"],
    ):  # fmt: skip
        code, output = run("generate", "x", *arguments)
        assert code == 2 and "loading" not in output, output


def test_inspect_shows_dates_repeats_tags_steps_and_clip_skip_as_people_read_them(folder: Path) -> None:
    metadata = {
        "ss_training_started_at": "1700000000.5", "ss_training_finished_at": "soon",
        "modelspec.date": "2024-05-01T10:00:00", "ss_steps": "1500", "ss_clip_skip": "None",
        "ss_dataset_dirs": json.dumps({"10_dog": {"n_repeats": 10, "img_count": 15}}),
        "ss_tag_frequency": json.dumps({"10_dog": {"dog": 15, "grass": 4}}),
    }  # fmt: skip
    save_file(load_file(PIXEL), folder / "a.safetensors", metadata)
    page = run("inspect", "a.safetensors")[1]
    for text in (
        "2023-11-14 22:13:20 UTC", "soon", "2024-05-01T10:00:00", "10_dog: 15 images x 10 repeats",
        "dog (15), grass (4)", "1500",
    ):  # fmt: skip
        assert text in page, text
    settings = json.loads(run("inspect", "a.safetensors", "--json")[1])["training"]
    assert (settings["started_at"], settings["clip_skip"], settings["steps"]) == (
        "2023-11-14 22:13:20 UTC",
        "1",
        "1500",
    )
