"""The page in a real browser, against a real worker: tests/page/run.mjs drives the flows in tests/page/flows.

One worker and one browser serve all flows. `make test` runs the core ones: an image is generated, compared,
edited; `--full` runs every one (two minutes on two cores). `PAGE_ONLY=text` runs those whose name contains the text,
`PAGE_SHOTS=folder` keeps screenshots of every view.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inweave.models import embedded
from tests.peers import tiny_models as tiny
from tests.serve.worker import Worker
from tests.support import sized

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
TOKEN = "correct: horse / battery"
#: hostile names, each of which must be shown as text
HOSTILE = ("<img src=x onerror=alert(1)>", "'\"><script>alert(2)<∕script>", "${alert(3)} `x` \u202egnp.x")

#: the same in the metadata of a file
METADATA = {
    "modelspec.title": "<img src=x onerror=alert(4)>",
    "modelspec.description": "<script>alert(5)</script> \u202egnp.x",
    "modelspec.trigger_phrase": "<b onclick=alert(6)>word</b>, <lora:ink:9>, <lo<lora:a:1>ra:ink:9>, soft edges",
    "ss_output_name": "javascript:alert(7)",
    "<i>key</i>": "${alert(8)}",
}


def with_metadata(file: bytes, metadata: dict[str, str]) -> bytes:
    """Return a safetensors file with other metadata."""
    size = int.from_bytes(file[:8], "little")
    header = json.dumps({**json.loads(file[8 : 8 + size]), "__metadata__": metadata}).encode()
    return len(header).to_bytes(8, "little") + header + file[8 + size :]


pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed"),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium"),
    pytest.mark.skipif(
        not (ROOT / "node_modules" / "playwright-core").is_dir(), reason="npm has not installed playwright-core"
    ),
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker that keeps its address across restarts, with LoRAs whose names are attacks."""
    folder = tmp_path_factory.mktemp("page")
    loras = folder / "loras"
    loras.mkdir()
    ink = embedded.folder() / "loras" / "ink.safetensors"
    for name in HOSTILE:
        shutil.copyfile(ink, loras / f"{name}.safetensors")
    (loras / "metadata.safetensors").write_bytes(with_metadata(ink.read_bytes(), METADATA))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # `make test` runs no flow of a second model
    models = ("--also", f"edit={tiny.folder('flux2-klein-4b')}") if sized(0, 1) else ()
    running = Worker(folder / "data", "--port", str(port), "--lora-dir", str(loras), *models).start()
    yield running
    running.stop()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Worker]:
    """Start a worker with a token, on request of a flow."""
    other = Worker(tmp_path / "data", token=TOKEN)
    yield other
    if other.process is not None:
        other.kill()


def test_flows_of_the_page(worker: Worker, locked: Worker) -> None:
    options = ["--core"][: sized(1, 0)]
    for variable, option in (("PAGE_ONLY", "--only"), ("PAGE_SHOTS", "--shots")):
        if value := os.environ.get(variable):
            options += [option, value]
    command = ["node", str(ROOT / "tests" / "page" / "run.mjs"), worker.url, *options]
    environment = {**os.environ, "CHROMIUM": CHROMIUM}
    results = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as node:
        assert node.stdin is not None and node.stdout is not None
        for line in node.stdout:
            message = json.loads(line)
            if message.get("ask") == "restart":
                worker.kill()
                worker.start(wait=False)
                print("{}", file=node.stdin, flush=True)
            elif message.get("ask") == "token":
                locked.start(wait=False)
                print(json.dumps({"address": locked.url, "token": TOKEN}), file=node.stdin, flush=True)
            else:
                results.append(message)
    for result in results:
        print(f"{result['seconds']:6.1f} s  {result['name']}", *result["notes"], sep="\n          ")
    failed = [f"{result['name']}\n{result['error']}" for result in results if result["error"]]
    assert not failed, "\n\n".join(failed)
    assert node.returncode == 0 and results
