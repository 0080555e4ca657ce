"""Every Python block and every command of README and docs runs as printed, with fewer steps.

The blocks of a page share their names, in the order of the page. The reader's own objects (a diffusers pipeline, a
torch model, LoRA files) are prepared; blocks that need a large model or never end are listed in `LARGE` and not run.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.formats.files import write_file
from inweave.models import embedded
from tests.support import sized, tensor

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: its blocks need a running worker: tests/serve/test_page.py starts one and runs them
SERVING = ROOT / "docs" / "serving.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RECIPE = re.compile(r"^<!-- recipe: \w+ -->\n```python\n.*?^```", re.MULTILINE | re.DOTALL)
STEPS = 1
#: models that no test machine has, and commands whose point is to keep running
LARGE = re.compile(
    r"--model \S*\.safetensors|--base model\.safetensors|inweave train examples/style\.toml|inweave (serve|demo)\b"
)
#: exit codes that a page shows on purpose
CODES = {"check": {0, 1}}


class MyLinear(nn.Linear):
    """A layer class of the reader's own."""


def python_of(page: Path) -> str:
    """Return the Python of a page, without recipes: their own tests bring the models that those need."""
    blocks = BLOCK.findall(RECIPE.sub("", page.read_text()))
    text = "\n".join(body for language, body in blocks if language == "python")
    return re.sub(r"\bsteps=\d+", f"steps={STEPS}", text)


def commands_of(page: Path) -> Iterator[str]:
    for language, body in BLOCK.findall(page.read_text()):
        for line in body.replace("\\\n", " ").splitlines() if language in ("", "sh", "console") else ():
            line = line.removeprefix("$ ").split("  #")[0].strip()
            if re.match(r"inweave [a-z]", line) and not LARGE.search(line):
                yield line


def first_commands() -> dict[Path, list[str]]:
    """Return the commands of each page, without those of earlier pages that differ only in the prompt."""
    known: set[str] = set()
    pages: dict[Path, list[str]] = {}
    for page in PAGES:
        lines = {re.sub('"[^"]*"', "", line): line for line in commands_of(page)}
        pages[page] = [line for form, line in lines.items() if form not in known]
        known |= lines.keys()
    return pages


COMMANDS = first_commands()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare a folder with the files that pages name, where the built-in model takes a few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "VARIANT", replace(embedded.VARIANT, steps=STEPS))
    for name, style in (("style", "pixel"), ("lora", "pixel"), ("detail", "ink"), ("other", "ink")):
        shutil.copy(embedded.loras()[style], f"{name}.safetensors")
    modules = [
        f"lora_unet_double_blocks_{block}_img_attn_qkv" for block in range(19)
    ]  # one block alone fits many bases
    factors = {"lora_down.weight": np.ones((4, 3072)), "lora_up.weight": np.ones((9216, 4)), "alpha": np.array(4.0)}
    write_file(
        "flux_kohya.safetensors",
        {f"{module}.{role}": tensor(values) for module in modules for role, values in factors.items()},
    )
    Path("style.toml").write_text(
        f'dataset = "inweave/pixel"\noutput = "trained"\nname = "style"\nsteps = {STEPS}\nbatch_size = 1\n'
    )
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (0, 0, 64, 128))
    mask.save("mask.png")
    return tmp_path


def brought_along(text: str) -> dict[str, Any]:
    """Return the objects that a page's blocks expect from the reader."""
    names: dict[str, Any] = {}
    if "Weaver(pipe)" in text:
        from diffusers import StableDiffusionPipeline

        names["pipe"] = StableDiffusionPipeline.from_pretrained(embedded.folder(), safety_checker=None)
        names["model"] = names["pipe"].unet
    if "MyLinear" in text:
        names["MyLinear"] = MyLinear
    return names


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_of(page) and page != SERVING], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs_as_printed(page: Path, place: Path) -> None:
    text = python_of(page)
    (place / "page.py").write_text(text)
    runpy.run_path(str(place / "page.py"), init_globals=brought_along(text))


#: the README's always; those of all pages in the exhaustive run
PAGES_RUN = [page for page, lines in COMMANDS.items() if lines][: sized(1, len(PAGES))]


@pytest.mark.parametrize("page", PAGES_RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_printed(page: Path, place: Path) -> None:
    Path("out").mkdir()
    shutil.copy(embedded.loras()["pixel"], "out/lora.safetensors")  # what an earlier command of the page trains
    for line in COMMANDS[page]:
        words = shlex.split(line)[1:]
        options = ["--steps", str(STEPS)] if words[0] == "train" else []
        if words[0] == "train":
            words = [
                *words[: words.index("--output")],
                "--output",
                f"run-{len(list(place.iterdir()))}",
                *words[words.index("--output") + 2 :],
            ]
            options += ["--set", "batch_size=1"]
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code in CODES.get(words[0], {0}), f"{line}\n{result.output}"
        assert result.exception is None or isinstance(result.exception, SystemExit), line
