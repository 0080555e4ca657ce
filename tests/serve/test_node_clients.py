"""JavaScript clients from the registry: openai, ai with its OpenAI-compatible provider, node-sd-webui."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.worker import Worker

SOURCE = Path(__file__).parent / "node"


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node and npm are not installed")
def test_javascript_clients(worker: Worker, tmp_path: Path) -> None:
    for name in ("package.json", "package-lock.json", "clients.mjs"):
        shutil.copy(SOURCE / name, tmp_path)
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert installed.returncode == 0, installed.stderr
    done = subprocess.run(
        ["node", "clients.mjs", worker.url], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = {line["name"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    assert seen == {
        "generate": True, "stream": ["image_generation.partial_image", "image_generation.completed"], "edit": 1,
        "error": [404, "NotFoundError"], "ai-sdk": True, "node-sd-webui": 1,
    }  # fmt: skip
