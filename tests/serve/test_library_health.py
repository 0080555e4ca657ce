"""The health of library files on the command line and over HTTP: one line per problem, with a remedy."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.cli.tables import fact_lines, table, wrap_text
from inweave.files.documents import format_json
from inweave.files.paths import printable
from inweave.library import Library
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from tests.serve.test_hostile_loras import client_of
from tests.support import lora_pair, random, sized, tensor, write

MODULE = "lora_unet_down_blocks_0_attentions_0_proj_in"
HIDDEN = ["\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\u00ad", "\u2028", "\u3164", "\u115f", "\u2800", "\u034f",
          "\U000e0041", "\U000e0101", "\x1b[31m", "\x9b31m", "\r", "\x07"]  # fmt: skip


def pair(seed: int) -> dict[str, Any]:
    return dict(lora_pair(MODULE, 16, 16, seed=seed, alpha=4.0))


def with_up(seed: int, up: np.ndarray) -> dict[str, Any]:
    return pair(seed) | {f"{MODULE}.lora_up.weight": tensor(up)}


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sick") / "loras"
    root.mkdir()
    write(root / "fine.safetensors", pair(1))
    write(root / "orphan.safetensors", pair(2) | {"lora_unet_x.lora_down.weight": random(1, 4, 8)})
    write(root / "orphans.safetensors", pair(3) | {f"lora_unet_{n}.lora_up.weight": random(n, 8, 4) for n in range(30)})
    write(root / "untrained.safetensors", with_up(4, np.zeros((16, 4))))
    broken = np.ones((16, 4))
    broken[0, 0], broken[1, 1] = np.nan, np.inf
    write(root / "nan.safetensors", with_up(5, broken))
    whole = (root / "fine.safetensors").read_bytes()
    (root / "cut.safetensors").write_bytes(whole[:-50])
    (root / "cut-header.safetensors").write_bytes(whole[:60])
    (root / "empty.safetensors").write_bytes(b"")
    (root / "login.safetensors").write_bytes(b"<!doctype html><title>Log in</title>")
    (root / "twin.safetensors").write_bytes(whole)
    return root


#: file -> parts of its line: the problem and the remedy
EXPECTED = {
    "orphan": ("lora_up is missing", "download it again"),
    "orphans": ("and at least 19 more", "download it again"),
    "untrained": ("1 factor holds only zeros, so it changes nothing", "use a later epoch"),
    "nan": ("1 tensor holds NaN or infinity", "use an earlier epoch"),
    "cut": ("cut short", "download or copy it again"),
    "cut-header": ("cut short", "download or copy it again"),
    "empty": ("empty", "download or copy it again"),
    "login": ("a web page", "needs a login"),
}


def run(root: Path, *arguments: str, code: int = 0) -> str:
    database = str(root.parent / "index.sqlite3")
    result = CliRunner().invoke(app, ["library", *arguments, "--folder", str(root), "--database", database])
    assert result.exit_code == code, result.output
    return result.stdout


def test_doctor_and_show_name_what_is_wrong_and_what_to_do(sick: Path) -> None:
    lines = run(sick, "doctor", code=1).splitlines()
    report = json.loads(run(sick, "doctor", "--json", code=1))
    assert {Path(each["path"]).stem: len(each["health"]) for each in report["unhealthy"]} == dict.fromkeys(EXPECTED, 1)
    for name, texts in EXPECTED.items():
        (line,) = (line for line in lines if line.startswith(f"  {name}.safetensors: "))
        page = run(sick, "show", name)
        document = json.loads(run(sick, "show", name, "--json"))
        for text in texts:
            assert text in line and text in page and text in document["health"][0], name
        assert line.count(f"{name}.safetensors") == 1, "not twice"
    assert "  same tensors: fine.safetensors, twin.safetensors; keep one of them" in lines
    assert report["duplicates"] == [["fine.safetensors", "twin.safetensors"]]
    assert json.loads(run(sick, "show", "twin", "--json"))["duplicates"] == ["fine.safetensors"]
    assert "same tensors: fine.safetensors" in run(sick, "show", "twin")
    assert json.loads(run(sick, "show", "fine", "--json"))["health"] == []


def test_clients_get_the_same(sick: Path, tmp_path: Path) -> None:
    service = Service.open(ServeSettings(data=tmp_path / "data", lora_folders=(sick,)))
    service.library.scan()
    service.library.examine()

    async def ask() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        async with client_of(service) as client:
            return (await client.get("/v1/loras")).json()["loras"], (await client.get("/v1/loras/nan")).json()

    rows, single = asyncio.run(ask())
    service.library.close()
    service.store.close()
    by_name = {each["name"]: each for each in rows if each["name"] in (*EXPECTED, "fine", "twin")}
    for name, texts in EXPECTED.items():
        assert len(by_name[name]["health"]) == 1 and all(text in by_name[name]["health"][0] for text in texts)
        assert str(sick) not in json.dumps(by_name[name])
    assert single["health"] == by_name["nan"]["health"]
    assert (by_name["fine"]["health"], by_name["fine"]["duplicates"]) == ([], ["twin.safetensors"])


def test_what_shows_nothing_or_turns_text_around_is_escaped(tmp_path: Path) -> None:
    """Names, metadata and trigger words: escaped on the terminal, in JSON and for display; unchanged as data."""
    root = tmp_path / "loras"
    root.mkdir()
    for number, mark in enumerate(HIDDEN):
        text = f"a{mark}b{number}"
        write(root / f"{text}.safetensors", pair(number), {"ss_output_name": text, "modelspec.trigger_phrase": text})
        (root / f"{text}.json").write_text(json.dumps({"notes": text, "description": text, "activation text": text}))
        assert mark not in printable(text) + format_json({text: text}), ascii(mark)
    pages = [run(root, "list"), run(root, "list", "--json"), run(root, "doctor")]
    documents = {each["name"]: each for each in json.loads(pages[1])["loras"]}
    for number, mark in enumerate(HIDDEN):
        name = f"a{mark}b{number}"
        assert documents[name]["display_name"] == printable(name) != name and documents[name]["alias"] == name
        if number % sized(6, 1) == 0:
            pages += [run(root, "show", documents[name]["id"]), run(root, "find", documents[name]["id"])]
    for page in pages:
        assert [mark for mark in HIDDEN if mark in page] == []
    assert (
        printable("\u2764\ufe0f caf\u00e9 \u65e5\u672c \u0645\u0631\u062d\u0628\u0627")
        == "\u2764\ufe0f caf\u00e9 \u65e5\u672c \u0645\u0631\u062d\u0628\u0627"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
def test_a_list_fits_the_terminal_and_is_whole_in_a_pipe(width: int | None) -> None:
    rows = [
        ["pixel", "inweave/emoji", "lora+locon", "rank 8", "pxl", "styles/pixel.safetensors"],
        ["\u65e5\u672c\u8a9e" * 30, "sdxl", "lora", "rank 4 to 128", "w" * 300, "p" * 300],
        ["e\u0301" * 20, "unknown base", "-", "-", "-", "x"],
    ]
    lines = table(rows, width)
    if width is None:
        assert all(cell in line for row, line in zip(rows, lines, strict=True) for cell in row)
        return
    assert all(cell_len(line) + 2 <= max(width, 62) for line in lines)
    assert lines[0].startswith("pixel ") and "\u2026" in lines[1]
    assert ("pxl" in lines[0], "styles" in lines[0]) == (width >= 76, width >= 110)
    text = "a long line of words " * 20 + "h" * 64
    assert all(len(line) <= width - 2 or "h" * 64 in line for line in wrap_text(text, width, "  "))
    assert " ".join(line.strip() for line in wrap_text(text, width, "  ")) == text
    assert [name for name, _ in fact_lines([("a", text), ("a", "x"), ("b", "y")], width) if name] == ["a", "b"]


def test_on_a_terminal_lines_fit_and_no_color_means_no_color(sick: Path) -> None:
    """A real terminal: lines fit its width, and health has separate lines."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "inweave",
        "library",
        "list",
        "--folder",
        str(sick),
        "--database",
        str(sick.parent / "t.sqlite3"),
    ]
    environment = {**os.environ, "COLUMNS": "60", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:
        pass  # a terminal whose other side is closed
    assert process.wait() == 0
    os.close(ours)
    # a scan that takes long shows its progress, which moves the cursor and is cleared
    text = re.sub(r"\r|\x1b\[\?25[lh]|\x1b\[\d?[AK]|[^\n]*━[^\n]*\n?", "", output.decode().replace("\r\n", "\n"))
    lines = text.splitlines()
    assert not re.search(r"\x1b\[[\d;]*m", output.decode()) and max(map(len, lines)) <= 60
    assert any(line.startswith("  login ") for line in lines) and any(
        line.startswith("    a web page") for line in lines
    )


def test_a_search_takes_words_in_any_case_and_form(tmp_path: Path) -> None:
    root = tmp_path / "loras"
    root.mkdir()
    write(
        root / "Cafe\u0301 NOIR.safetensors",
        pair(1),
        {"modelspec.trigger_phrase": "\u00c9toile", "ss_tag_frequency": '{"a": {"x": 1}}'},
    )
    library = Library(tmp_path / "library.sqlite3", [root])
    library.scan()
    for text in ("caf\u00e9", "CAF\u00c9 noir", "cafe\u0301", "\u00e9toile", "E\u0301TOILE", ""):
        assert len(library.entries(text)) == 1, text
    for text in ("ss_tag", "source", "words", "100%", "_", "x" * 100_000):
        assert library.entries(text) == [], text
    library.close()
    assert (
        "at most 50 words"
        in CliRunner()
        .invoke(app, ["library", "list", "a " * 60, "--folder", str(root), "--database", str(tmp_path / "d")])
        .output
    )
