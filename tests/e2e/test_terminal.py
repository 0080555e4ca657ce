"""The progress display: something within half a second, never two seconds of silence, nothing without a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

#: seconds for what takes 0.5 on an idle machine: tests share theirs with others, and the process itself has to start
FIRST = 0.5
SILENCE = 2.0


def at_a_terminal(arguments: list[str], folder: Path, **variables: str) -> tuple[int, str, list[float]]:
    """(exit code, what was written, when) of a command whose stdout and stderr are a terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | variables
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "inweave", *arguments],
        cwd=folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    text, times = b"", list[float]()
    while True:
        ready, _, _ = select.select([master], [], [], 120)
        assert ready, "no output for two minutes"
        try:
            block = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        text += block
        times.append(time.monotonic() - started)
    os.close(master)
    return process.wait(), text.decode("utf-8", "replace"), times


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["resize", "pixel", "--rank", "2", "-o", "small.safetensors"],
        ["bake", "--base", "inweave/emoji", "--lora", "pixel", "-o", "merged"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_loads_torch_starts_and_works_with_a_bar(arguments: list[str], tmp_path: Path) -> None:
    """Also a narrow one, whose owner wants no colors."""
    code, text, times = at_a_terminal(arguments, tmp_path, NO_COLOR="1", COLUMNS="30")
    assert code == 0, text
    assert "\x1b[3" not in text and "\x1b[9" not in text, "a color"
    idle = interpreter_seconds()
    assert times[0] < FIRST + 4 * idle, "nothing on the screen"
    pauses = [after - before for before, after in pairwise(times)]
    assert max(pauses) < SILENCE + 4 * idle, "a silence"
    assert "resizing" in text or "merging" in text


def interpreter_seconds() -> float:
    """Return the seconds that the imports of every command take: a measure of the load on this machine."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import inweave.cli.app, rich.progress"], check=True)
    return time.monotonic() - started


def test_off_a_terminal_there_is_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inweave", "resize", "pixel", "--rank", "2"]
    plain = subprocess.run([*command, "-o", "a.safetensors"], cwd=tmp_path, capture_output=True, text=True)
    assert (plain.returncode, plain.stderr) == (0, "resizing\n"), plain.stderr


def test_a_slow_reader_says_so_off_a_terminal_and_a_quick_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from inweave.cli import progress

    for wait, expected in ((30.0, ""), (0.05, "reading files\nreading files: 3/9\n")):
        monkeypatch.setattr(progress, "EVERY", wait)
        with progress.display(delay=progress.LATE) as lines:
            lines.start("reading files")
            deadline = time.monotonic() + 10
            while wait < 1 and not lines._printed and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.1)
            lines.update("reading files", 3, 9)
        assert capsys.readouterr().err == expected
    with progress.display(True, delay=progress.LATE) as lines:  # --json
        lines.start("reading files")
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_slow_reader_shows_a_bar_and_a_quick_one_does_not() -> None:
    """Check that the timer shows the activity even if nothing reports progress."""
    from inweave.cli.progress import Display

    quick = Display(delay=30.0)
    quick.start("reading")
    quick.stop()
    assert not quick.live
    slow = Display(delay=0.05)
    slow.start("reading")
    deadline = time.monotonic() + 10
    while not slow.live and time.monotonic() < deadline:
        time.sleep(0.02)
    is_live = slow.live
    slow.stop()
    assert is_live and not slow.live
