"""Code that commands share: optional values, missing packages, the progress display, exit codes."""

from __future__ import annotations

import io
import json
import sys

import pytest
import typer

from inweave.cli import extras
from inweave.cli.console import PROBLEMS, print_lines, reporting_errors
from inweave.cli.options import with_default_value
from inweave.cli.progress import display
from inweave.cli.train import record_figures, show_record
from inweave.errors import ConfigError, FormatError, TargetError, amount


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.toml", "--resume"], ["a.toml", "--resume", "auto"]),
        (["--resume", "a.toml"], ["--resume", "auto", "a.toml"]),
        (["--resume", "--steps", "3"], ["--resume", "auto", "--steps", "3"]),
        (["--resume", "out/state/step-000003"], ["--resume", "out/state/step-000003"]),
        (["--resume", "auto", "a.toml"], ["--resume", "auto", "a.toml"]),
        (["--resume=out/state"], ["--resume=out/state"]),
        (["--", "--resume"], ["--", "--resume"]),
        ([], []),
    ],
)
def test_resume_needs_no_value(arguments: list[str], expected: list[str]) -> None:
    assert with_default_value(arguments, "--resume", "auto") == expected


@pytest.mark.parametrize(
    ("extra", "names"),
    [("generate", "torch, diffusers, transformers, tokenizers, huggingface-hub and pillow"), ("torch", "torch")],
)
def test_a_missing_package_names_the_extra(
    extra: str, names: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as stop:
        extras.require(extra, as_json=True)
    assert stop.value.exit_code == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == f'this command needs {names}; install with: pip install "inweave[{extra}]"'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "bar"), [(Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)]
)
def test_a_progress_bar_only_on_a_terminal(
    stream: io.StringIO, quiet: bool, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with display(quiet) as progress:
        assert progress.live is bar
        progress.byte_counter("merging")(1, 2)
        figures = {"loss": 0.25, "lr": 1e-4, "steps_per_second": 2.0, "memory": 2**30, "skipped_steps": 1}
        show_record(progress, {"step": 1, "total": 3, **figures})
        progress.line("a line \x1b[31m")
    text = stream.getvalue()
    assert ("merging" in text) == bar and ("loss 0.2500" in text) == bar
    assert "a line \\x1b[31m" in text


def test_a_step_on_one_line() -> None:
    record = {"step": 20, "total": 30, "loss": 0.25, "loss_average": 0.5, "lr": 1e-4, "steps_per_second": 2.0}
    assert record_figures(record) == "20/30  loss 0.2500  average 0.5000  lr 1.00e-04  2.00 it/s"
    assert record_figures({**record, "loss": None, "loss_average": None}).startswith("20/30  loss not finite  lr")


def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for error, code in ((ConfigError("a"), 2), (ConfigError(["a", "b"]), 2), (TargetError("a"), PROBLEMS)):
        with pytest.raises(typer.Exit) as stop, reporting_errors(False, target_code=PROBLEMS):
            raise error
        assert stop.value.exit_code == code
    assert capsys.readouterr().err == "error: a\nerror: 2 problems\n  a\n  b\nerror: a\n"


def test_long_lists_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["one", "two", "three"], limit=2, more="missing: ")
    assert capsys.readouterr().out == "  one\n  two\n  missing: and 1 more\n"


def test_a_list_of_files_is_one_per_line_and_other_messages_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for message, lines in (
        ("photos: 2 files cannot be used\n  photos/a.png: empty\n  photos/b.png: cut short", 3),
        ("style.safetensors: not valid\nJSON", 1),
    ):
        with pytest.raises(typer.Exit), reporting_errors(False):
            raise FormatError(message)
        text = capsys.readouterr().err
        assert len(text.splitlines()) == lines and text.startswith("error: "), text


def test_one_is_singular() -> None:
    assert [amount(1, "image"), amount(2, "image"), amount(1, "batch"), amount(1000, "batch")] == [
        "1 image", "2 images", "1 batch", "1,000 batches",
    ]  # fmt: skip
