"""What the documentation shows exists: links, public names, commands and their options."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from tools.architecture_page import render

import inweave
from inweave.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
NAME = re.compile(r"\binweave\.([A-Za-z_]\w*)")
#: documented elsewhere than in `__all__`: sub-packages, keys of metadata, groups of entry points
PACKAGES = {path.stem for path in (ROOT / "src" / "inweave").iterdir()}
#: settings that are valid only together with another
NEEDED_BESIDE: dict[str, dict[str, object]] = {
    "conv_rank": {"network": "locon"},
    "conv_alpha": {"network": "locon"},
    "text_encoder_learning_rate": {"train_text_encoders": True},
    "optimizer_args": {"optimizer": "prodigy", "learning_rate": 1.0},
}
METADATA = {"config", "version", "merged", "alpha"}
ENTRY_POINTS = {"algorithms", "dialects", "families"}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in BLOCK.findall(page.read_text()):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """Lines of shell blocks and code spans that call the program, split into words."""
    text = page.read_text()
    spans = re.findall(r"`(inweave [a-z][^`\n]*)`", BLOCK.sub("", text))
    lines = [
        line.removeprefix("$ ")
        for block in blocks(page, "", "sh", "console")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in [*spans, *lines]:
        if re.match(r"inweave [a-z]", line):
            yield shlex.split(line.split(" #")[0].split("   ")[0].replace("...", ""))[1:]


def test_every_extra_is_in_the_table_of_the_readme() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert extras.keys() <= {name for each in rows for name in re.findall(r"`(\w+)`", each)}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_parses_and_uses_public_names(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    unknown = set(NAME.findall(page.read_text())) - set(inweave.__all__) - PACKAGES - METADATA - ENTRY_POINTS
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_options_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for words in commands(page):
        command = root.commands.get(words[0])  # type: ignore[attr-defined]
        assert command is not None, f"{page.name}: inweave {words[0]}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if hasattr(command, "commands"):
            continue  # a group: its own commands are checked by name only
        used = {word.split("=")[0] for word in words[1:] if re.match(r"--?[A-Za-z]", word)}
        assert not used - known, f"{page.name}: inweave {' '.join(words)}"


def test_the_example_configuration_is_valid_and_names_every_setting() -> None:
    example = ROOT / "examples" / "style.toml"
    config = inweave.TrainConfig.load(example)
    assert config.rank == 16 and config.vram == "12GiB"
    lines = example.read_text().splitlines()
    listed = {match[1] for line in lines if (match := re.match(r"(?:# )?(\w+) = ", line))}
    assert listed == set(inweave.TrainConfig.model_fields)


def test_every_line_of_the_example_configuration_is_valid_on_its_own() -> None:
    for line in (ROOT / "examples" / "style.toml").read_text().splitlines():
        if match := re.match(r"# (\w+ = .*)", line):
            name, value = next(iter(tomllib.loads(match[1]).items()))
            base = {} if name == "epochs" else {"steps": 10}
            inweave.TrainConfig.of(**{"dataset": "inweave/pixel", **NEEDED_BESIDE.get(name, base), name: value})


def test_the_tables_of_the_architecture_page_are_what_the_tests_enforce() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert page.count("<!-- generated: ") == page.count("<!-- end -->") == 5
    assert render(page) == page, "run `python tools/architecture_page.py`"


def test_the_dialects_of_the_formats_page_are_those_of_the_registry() -> None:
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    assert page.count("<!-- generated: dialects -->") == 1
    assert render(page) == page, "run `python tools/architecture_page.py`"


def test_the_file_tree_is_that_of_the_package() -> None:
    page = (ROOT / "docs" / "files.md").read_text("utf-8")
    assert render(page) == page, "run `python tools/architecture_page.py`"
