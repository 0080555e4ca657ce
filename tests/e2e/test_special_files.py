"""Every command with a named pipe, a device, a folder, or a name that no file can have, wherever it takes a file.

Each ends with one line of output within two seconds, even for a pipe that never gets a writer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("diffusers")

from PIL import Image

from inweave.cli.app import app
from inweave.errors import InweaveError
from inweave.models import embedded
from inweave.training.data.reader import read_dataset
from tests.support import stopwatch

FILES = Path(__file__).parents[1] / "data" / "files"
ADAPTER = str(FILES / "cloneofsimo_lora_disney.safetensors")
LORA = str(next(iter(embedded.loras().values())))
MODEL = str(embedded.folder())


def _pipe(folder: Path, name: str) -> str:
    os.mkfifo(folder / name)
    return str(folder / name)


def _long(folder: Path, name: str) -> str:
    return str(folder / ("x" * 300 + name))


def _link(folder: Path, name: str) -> str:
    (folder / name).symlink_to("nowhere")
    return str(folder / name)


#: what lies where a file is expected: a maker of it, by the name the file should have
KINDS: dict[str, Callable[[Path, str], str]] = {
    "pipe": _pipe,
    "long name": _long,
    "dangling link": _link,
    "device": lambda folder, name: "/dev/zero",
    "nobody's home": lambda folder, name: f"~nosuchuser/{name}",
    "bytes that are not text": lambda folder, name: str(folder / f"a\udcff{name}"),
}

#: where files are taken from the command line: (what the file should be called, the arguments around it)
READERS: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "inspect": ("a.safetensors", lambda at, tmp: ["inspect", at]),
    "check": ("a.safetensors", lambda at, tmp: ["check", at, "--base", "sd1.5"]),
    "check --base": ("a.safetensors", lambda at, tmp: ["check", ADAPTER, "--base", at]),
    "convert": ("a.safetensors", lambda at, tmp: ["convert", at, f"{tmp}/o.safetensors", "--to", "kohya"]),
    "convert --base": (
        "a.safetensors",
        lambda at, tmp: ["convert", ADAPTER, f"{tmp}/o.safetensors", "--to", "kohya", "-b", at],
    ),
    "hash": ("a.safetensors", lambda at, tmp: ["hash", at]),
    "bake --base": ("a.safetensors", lambda at, tmp: ["bake", "-b", at, "-l", LORA, "-o", f"{tmp}/o.safetensors"]),
    "bake --lora": ("a.safetensors", lambda at, tmp: ["bake", "-b", MODEL, "-l", at, "-o", f"{tmp}/o"]),
    "extract": ("a.safetensors", lambda at, tmp: ["extract", at, MODEL, "-o", f"{tmp}/o.safetensors"]),
    "extract base": ("a.safetensors", lambda at, tmp: ["extract", MODEL, at, "-o", f"{tmp}/o.safetensors"]),
    "resize": ("a.safetensors", lambda at, tmp: ["resize", at, "--rank", "2", "-o", f"{tmp}/o.safetensors"]),
    "generate --model": ("a.safetensors", lambda at, tmp: ["generate", "x", "-m", at, "-o", f"{tmp}/o.png"]),
    "generate --lora": ("a.safetensors", lambda at, tmp: ["generate", "x", "-l", at, "-o", f"{tmp}/o.png"]),
    "generate --from": ("a.png", lambda at, tmp: ["generate", "--from", at, "-o", f"{tmp}/o.png"]),
    "generate --init": ("a.png", lambda at, tmp: ["generate", "x", "--init", at, "-o", f"{tmp}/o.png"]),
    "generate --mask": (
        "a.png",
        lambda at, tmp: ["generate", "x", "--init", str(image(tmp)), "--mask", at, "-o", f"{tmp}/o.png"],
    ),
    "train": ("a.toml", lambda at, tmp: ["train", at, "--check"]),
    "train --import": ("a.toml", lambda at, tmp: ["train", "--import", at]),
    "train --import yaml": ("a.yaml", lambda at, tmp: ["train", "--import", at]),
    "train --model": (
        "a.safetensors", lambda at, tmp: ["train", "-m", at, "-d", "inweave/pixel", "-o", str(tmp), "--check"],
    ),
    "train --dataset": ("a.toml", lambda at, tmp: ["train", "-m", MODEL, "-d", at, "-o", f"{tmp}/o", "--check"]),
    "train --dataset folder": ("a", lambda at, tmp: ["train", "-m", MODEL, "-d", at, "-o", f"{tmp}/o", "--check"]),
    "train --resume": (
        "step-000001",
        lambda at, tmp: [
            "train", "-m", "inweave/emoji", "-d", "inweave/pixel", "-o", f"{tmp}/o", "--resume", at, "--steps", "1",
        ],
    ),
}  # fmt: skip

#: where files are written to
WRITERS: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "convert": ("o.safetensors", lambda at, tmp: ["convert", ADAPTER, at, "--to", "kohya"]),
    "convert peft": ("o", lambda at, tmp: ["convert", ADAPTER, at, "--to", "peft"]),
    "resize": ("o.safetensors", lambda at, tmp: ["resize", LORA, "--rank", "1", "--base", MODEL, "-o", at]),
}


def image(folder: Path) -> Path:
    path = folder / "image.png"
    Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save(path)
    return path


class _Late(BaseException):
    """Nothing catches it on the way: a `TimeoutError` would pass for an error of the system."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupts whatever takes longer, and fails."""

    def late(number: int, frame: Any) -> None:
        raise _Late(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(arguments: list[str], seconds: float = 10) -> str:
    """Return the error of a command that must fail; a traceback or another exit code fails the test."""
    with at_most(seconds), stopwatch(time.process_time) as cost:
        result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), (arguments, result.exception, result.output)
    assert result.exit_code in (1, 2), (arguments, result.output)
    assert "error" in result.output.lower() or "does not fit" in result.output, (arguments, result.output)
    assert result.output.replace("\n", "").isprintable(), result.output
    assert cost.seconds < 2, (arguments, cost)
    return result.output


@pytest.fixture(scope="module", autouse=True)
def _imports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what the commands import, so that only the commands are timed."""
    import inweave.generate.pipeline
    import inweave.training.session
    import inweave.weights.offline.commands  # noqa: F401

    folder = tmp_path_factory.mktemp("warm")
    CliRunner().invoke(app, ["train", "-m", MODEL, "-d", "inweave/pixel", "-o", str(folder), "--check"])


@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_refused_at_once(reader: str, tmp_path: Path) -> None:
    name, arguments = READERS[reader]
    slow = reader in ("bake --lora", "generate --init", "generate --mask") or reader.startswith("train -")
    for number, (kind, make) in enumerate(KINDS.items()):
        if slow and kind not in ("pipe", "long name"):
            continue  # each of these reads a model first
        folder = tmp_path / str(number)
        folder.mkdir()
        refused(arguments(make(folder, name), folder))
        assert kind not in ("pipe",) or (folder / name).is_fifo()
        assert not list(folder.glob("o*"))


@pytest.mark.parametrize("writer", WRITERS)
def test_an_output_that_cannot_be_written_is_refused_at_once(writer: str, tmp_path: Path) -> None:
    name, arguments = WRITERS[writer]
    for number, (kind, make) in enumerate(KINDS.items()):
        if kind in ("dangling link", "nobody's home", "bytes that are not text"):
            continue  # a link is replaced by the file, and the others are ordinary names there
        folder = tmp_path / str(number)
        folder.mkdir()
        refused(arguments(make(folder, name), folder))


def dataset(folder: Path) -> Path:
    folder.mkdir()
    Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save(folder / "a.png")
    (folder / "a.txt").write_text("a cat")
    return folder


@pytest.mark.parametrize("name", ["b.png", "b.jpg", "a.txt", "metadata.jsonl", "a-masklabel.png", "1_x"])
@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_a_dataset_with_something_else_in_it(name: str, kind: str, tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set")
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder, name)
    try:
        with at_most(5):
            read_dataset(folder)
    except InweaveError as error:
        assert name in str(error)
    else:
        assert name in ("a-masklabel.png", "1_x")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_a_peft_directory_with_something_else_in_it(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(Path(ADAPTER).read_bytes())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1, "r": 1}')
    (tmp_path / name).unlink()
    KINDS[kind](tmp_path, name)
    for arguments in (
        ["inspect", str(tmp_path)],
        ["check", str(tmp_path), "--base", "sd1.5"],
        ["generate", "x", "-l", str(tmp_path)],
    ):
        assert name in refused(arguments)


@pytest.mark.parametrize("name", ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"])
def test_a_model_folder_with_a_pipe_in_it(name: str, tmp_path: Path) -> None:
    for path in sorted(embedded.folder().rglob("*")):
        if path.is_file() and not {"loras", "styles"} & set(path.parts):
            target = tmp_path / path.relative_to(embedded.folder())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    assert (tmp_path / name).is_symlink()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    refused(["generate", "x", "-m", str(tmp_path), "-o", f"{tmp_path}/o.png"])
    refused(["bake", "-b", str(tmp_path), "-l", LORA, "-o", f"{tmp_path}/../o"]) if "unet/d" in name else None


def test_a_checkpoint_with_a_pipe_in_it(tmp_path: Path) -> None:
    from inweave.errors import FormatError
    from inweave.training.checkpoint.store import load_state

    for name in ("state.json", "state.safetensors"):
        place = tmp_path / f"step-{name}"
        place.mkdir()
        (place / "state.json").write_text('{"step": 1, "version": 1, "sum": 0}')
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)
        with at_most(5), pytest.raises(FormatError, match="a named pipe"):
            load_state(place)


@pytest.mark.parametrize("kind", ["pipe", "long name", "dangling link"])
def test_a_file_of_sample_prompts_that_is_none(kind: str, tmp_path: Path) -> None:
    from inweave.training.config.schema import TrainConfig
    from inweave.training.output.sample_prompts import sample_requests

    path = KINDS[kind](tmp_path, "a.txt")
    config = TrainConfig(model="inweave/emoji", dataset="inweave/pixel", sample_prompts=(path,), sample_every=1)
    with at_most(5), pytest.raises(InweaveError, match=r"a\.txt"):
        sample_requests(config)
