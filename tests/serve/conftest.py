"""One worker for the tests that do not stop or kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.worker import Worker


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker with the embedded model and the bundled LoRAs."""
    running = Worker(tmp_path_factory.mktemp("worker") / "data").start()
    yield running
    running.stop()
