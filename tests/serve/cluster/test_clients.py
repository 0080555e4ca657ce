"""The suites of the clients, unchanged, against a worker whose jobs run in a cluster.

One runner: some of them wait until the worker is busy with a single job. Two tests of the native API are about the
model process as a child of the web process, which it is not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from _pytest.fixtures import FixtureFunctionDefinition

from tests.serve import test_faces, test_native, test_node_clients, test_rbee, test_sdapi
from tests.serve.cluster.setup import cluster
from tests.serve.worker import Worker

pytestmark = pytest.mark.full
LOCAL = {
    "test_the_address_answers_at_once_and_says_why_it_is_not_ready",
    "test_the_web_process_never_loads_torch",
}


def take_over(suite: ModuleType) -> None:
    """Collect the tests of another module here, with its fixtures."""
    for name, value in vars(suite).items():
        if name not in LOCAL and (name.startswith("test_") or isinstance(value, FixtureFunctionDefinition)):
            assert globals().setdefault(name, value) is value, f"{name} is in two suites"


for _suite in (test_faces, test_native, test_node_clients, test_rbee, test_sdapi):
    take_over(_suite)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker of a cluster in place of the plain one."""
    with cluster(tmp_path_factory.mktemp("clients"), 2, "--max-runners", "1") as setup:
        yield setup.worker
