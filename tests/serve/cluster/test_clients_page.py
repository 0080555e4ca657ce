"""The flows of the page in a browser, unchanged, against a worker whose jobs run in a cluster."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator

import pytest

from inweave.models import embedded
from tests.page import test_browser
from tests.page.test_browser import HOSTILE, METADATA, locked, test_flows_of_the_page, with_metadata
from tests.serve.cluster.setup import cluster
from tests.serve.worker import Worker

__all__ = ["locked", "test_flows_of_the_page"]
pytestmark = [pytest.mark.full, *test_browser.pytestmark]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker of a cluster with the LoRAs and the fixed port that the flows need."""
    folder = tmp_path_factory.mktemp("page")
    loras = folder / "loras"
    loras.mkdir()
    ink = embedded.folder() / "loras" / "ink.safetensors"
    for name in HOSTILE:
        shutil.copyfile(ink, loras / f"{name}.safetensors")
    (loras / "metadata.safetensors").write_bytes(with_metadata(ink.read_bytes(), METADATA))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--port", str(port), "--lora-dir", str(loras), "--max-runners", "1")
    with cluster(folder, 2, *options) as setup:
        yield setup.worker
