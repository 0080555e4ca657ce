"""The lines of docs/serving.md run verbatim, against a worker on another port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.serve.worker import Worker

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(worker: Worker, number: int, tmp_path: Path) -> None:
    Image.new("RGB", (128, 128), "red").save(tmp_path / "photo.jpg")
    language, text = BLOCKS[number]
    text = text.replace("127.0.0.1:7870", worker.url.removeprefix("http://")).replace(
        "port=7870", f"port={worker.url.rpartition(':')[2]}"
    )
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if language == "sh":
        assert json.loads(done.stdout)["state"] == "queued"


def test_there_are_blocks() -> None:
    assert [language for language, _ in BLOCKS].count("python") == 3
