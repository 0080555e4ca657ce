"""One worker for the tests that do not stop or kill it, one server of each kind of store, queues in either database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from safetensors.torch import save_file

from inweave.serve.jobs.postgresql import PostgresDatabase
from inweave.serve.jobs.store import JobStore
from tests.serve.postgres import INSTALL, Postgres, programs, serve_postgres
from tests.serve.s3_server import S3Server
from tests.serve.worker import Worker
from tests.unit.generate.upscaler_files import compact


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Yield a worker with the embedded model, the bundled LoRAs, a wildcard and an upscaler."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "wildcards").mkdir()
    (folder / "wildcards" / "colors.txt").write_text("red\ngreen\nblue\n")
    (folder / "upscalers").mkdir()
    save_file(compact(scale=2), folder / "upscalers" / "twice.safetensors")
    options = ("--wildcards", str(folder / "wildcards"), "--upscalers", str(folder / "upscalers"))
    running = Worker(folder / "data", *options).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Yield a PostgreSQL server; the tests that restart it leave it running."""
    if programs() is None:
        pytest.skip(INSTALL)
    yield from serve_postgres()


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield an S3 server; the tests that stop it leave it running."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture
def address(postgres: Postgres) -> str:
    """Return the address of an empty database."""
    return postgres.database(f"test_{uuid.uuid4().hex}")


Open = Callable[..., JobStore]


@pytest.fixture(params=["sqlite", "postgresql"])
def open_store(request: pytest.FixtureRequest) -> Open:
    """Return how a store in a folder is opened, in either database; the same folder is the same queue."""
    if request.param == "sqlite":
        return JobStore
    address = request.getfixturevalue("address")
    return lambda folder, **options: JobStore(folder, database=PostgresDatabase(address), **options)
