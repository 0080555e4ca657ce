"""The queue in either database: a job ends exactly once, in any sequence of calls and crashes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from inweave.errors import BusyError, ConflictError, MissingError, RequestError
from inweave.serve.jobs.job import FINAL, MAX_ATTEMPTS, Event, Failure, Submission
from inweave.serve.jobs.postgresql import PostgresDatabase
from inweave.serve.jobs.store import JobStore
from tests.serve.conftest import Open
from tests.support import sized


def submission(**fields: object) -> Submission:
    return Submission("image_generation", "inweave/emoji", {"config": {"prompt": "x"}}, **fields)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path, open_store: Open) -> Iterator[JobStore]:
    opened = open_store(tmp_path / "data")
    yield opened
    opened.close()


def test_jobs_run_by_priority_then_in_order(store: JobStore) -> None:
    first, second, urgent = (store.submit(submission(priority=p))[0].id for p in (0, 0, 5))
    assert [store.claim().id for _ in range(3)] == [urgent, first, second]  # type: ignore[union-attr]
    assert store.claim() is None


def test_a_submission_survives_the_process(tmp_path: Path, open_store: Open) -> None:
    before = open_store(tmp_path)
    job = before.submit(submission(inputs={"init.png": b"image"}))[0]
    before.close()
    after = open_store(tmp_path)
    after.recover()
    assert after.job(job.id).state == "queued"
    assert after.files.inputs(job.id) == {"init.png": b"image"}


def test_a_running_job_is_retried_once_and_then_fails(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path / "two")
    job = store.submit(submission())[0]
    for _ in range(MAX_ATTEMPTS):
        store.recover()
        assert store.claim().id == job.id  # type: ignore[union-attr]
        store.close()  # as if killed: no end was recorded
        store = open_store(tmp_path / "two")
    store.recover()
    ended = store.job(job.id)
    assert ended.state == "failed" and ended.error is not None and ended.error.code == "worker_restarted"
    assert [event.type for event in store.events(job.id)] == ["queued", "started", "retried", "started", "failed"]


OLD = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, model TEXT NOT NULL,
    state TEXT NOT NULL, priority INTEGER NOT NULL, client TEXT NOT NULL, request TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, cancel INTEGER NOT NULL DEFAULT 0, created REAL NOT NULL, started REAL,
    finished REAL, error TEXT, result TEXT, bytes INTEGER NOT NULL DEFAULT 0, expired INTEGER NOT NULL DEFAULT 0,
    idempotency_key TEXT UNIQUE, fingerprint TEXT NOT NULL DEFAULT ''
);
CREATE TABLE events (
    job TEXT NOT NULL, number INTEGER NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO jobs (id, kind, model, state, priority, client, request, attempts, created) VALUES
    ('job-a', 'image_generation', 'm', 'running', 0, '', '{}', 1, 1.0),
    ('job-b', 'image_generation', 'm', 'queued', 0, '', '{}', 0, 2.0);
PRAGMA user_version = 1;
"""


def test_a_queue_of_the_previous_layout_goes_on(tmp_path: Path) -> None:
    before = sqlite3.connect(tmp_path / "jobs.sqlite3")
    before.executescript(OLD)
    before.close()
    for _ in range(2):
        store = JobStore(tmp_path)
        store.recover()
        assert [job.id for job in store.waiting(9)] == ["job-a", "job-b"]
        store.close()
    store = JobStore(tmp_path)
    claimed = store.claim()
    assert claimed is not None and (claimed.id, claimed.attempts) == ("job-a", 2)
    assert store.finish("job-a", "done", result={})
    store.close()


@pytest.mark.parametrize("change", ["PRAGMA user_version = 99", "UPDATE layouts SET version = 99 WHERE name = 'jobs'"])
def test_a_queue_of_a_later_version_is_refused(change: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sqlite = change.startswith("PRAGMA")
    address = None if sqlite else request.getfixturevalue("address")
    for number in range(2):
        database = None if address is None else PostgresDatabase(address)
        if number:
            with pytest.raises(ConflictError, match="another version"):
                JobStore(tmp_path / "later", database=database)
        else:
            store = JobStore(tmp_path / "later", database=database)
            store._db.execute(change)
            store.close()


def test_one_process_at_a_time(tmp_path: Path, open_store: Open) -> None:
    first = open_store(tmp_path)
    with pytest.raises(ConflictError, match="another worker"):
        open_store(tmp_path)
    first.close()
    open_store(tmp_path).close()


def test_a_job_ends_once(store: JobStore) -> None:
    job = store.submit(submission())[0].id
    store.claim()
    assert store.finish(job, "done", result={"images": []})
    assert not store.finish(job, "failed", error=Failure("x", "y"))
    assert store.retry_or_fail(job, "worker_crashed", "gone") == "done"
    assert not store.append(job, Event("progress"))
    assert store.job(job).state == "done"


def test_a_cancelled_job_is_not_retried(store: JobStore) -> None:
    job = store.submit(submission())[0].id
    store.claim()
    store.cancel(job)
    assert store.retry_or_fail(job, "worker_crashed", "gone") == "cancelled"


def test_a_full_queue_refuses(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path, queue_limit=2)
    for _ in range(2):
        store.submit(submission())
    with pytest.raises(BusyError, match="full"):
        store.submit(submission())
    assert not (tmp_path / "files").exists()


def test_previews_in_events_count_for_the_size(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path, keep_bytes=15_000)
    jobs = []
    for _ in range(2):
        job = store.submit(submission())[0].id
        store.claim()
        store.append(job, Event("preview", {"image": "x" * 10_000}))
        store.finish(job, "done", result={})
        jobs.append(job)
    assert store.expire() == 1
    assert [store.job(job).expired for job in jobs] == [True, False]


def test_results_expire_by_age_and_by_size(tmp_path: Path, open_store: Open) -> None:
    now = [1000.0]
    store = open_store(tmp_path, keep_seconds=100, keep_bytes=1500, clock=lambda: now[0])
    jobs = []
    for _ in range(3):
        job = store.submit(submission())[0].id
        store.claim()
        store.files.write(job, "0.png", bytes(1000))
        store.finish(job, "done", result={"images": [{"file": "0.png"}]})
        jobs.append(job)
        now[0] += 1
    assert store.expire() == 2  # only the newest fits into 1,500 bytes
    assert [store.job(job).expired for job in jobs] == [True, True, False]
    assert not (tmp_path / "files" / jobs[0]).exists() and store.events(jobs[0]) == []
    now[0] += 1000
    assert store.expire() == 1
    with pytest.raises(MissingError):
        store.job("job-nosuch")


def test_an_idempotency_key_is_one_job_and_one_request(store: JobStore) -> None:
    job, new = store.submit(submission(idempotency_key="k", fingerprint="a"))
    again, second = store.submit(submission(idempotency_key="k", fingerprint="a"))
    assert (job.id, new, second) == (again.id, True, False)
    with pytest.raises(ConflictError):
        store.submit(submission(idempotency_key="k", fingerprint="b"))


@pytest.mark.parametrize("name", ["../jobs.sqlite3", ".0.png.part", "/etc/passwd", "nosuch", ""])
def test_only_files_of_the_job_are_served(store: JobStore, name: str) -> None:
    job = store.submit(submission())[0].id
    store.files.write(job, "0.png", b"x")
    with pytest.raises(MissingError):
        store.files.read(job, name)


class QueueMachine(RuleBasedStateMachine):
    """Random submissions, starts, ends, crashes and restarts, and the invariants of the queue."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self.store = self.open()
        self.final: dict[str, str] = {}
        self.known: set[str] = set()

    def open(self) -> JobStore:
        return JobStore(Path(self._folder.name))

    @rule(target=jobs, priority=st.integers(-2, 2))
    def submit(self, priority: int) -> str:
        job = self.store.submit(submission(priority=priority))[0].id
        assert job not in self.known
        self.known.add(job)
        return job

    @rule()
    def claim(self) -> None:
        waiting = self.store.jobs(states=("queued",), limit=1000)
        job = self.store.claim()
        assert (job is None) == (not waiting)
        if job is not None:
            assert (-job.priority, job.number) == min((-each.priority, each.number) for each in waiting)

    @rule(job=jobs, state=st.sampled_from(FINAL))
    def finish(self, job: str, state: str) -> None:
        running = self.store.job(job).state == "running"
        assert self.store.finish(job, state, result={} if state == "done" else None) == running  # type: ignore[arg-type]

    @rule(job=jobs)
    def cancel(self, job: str) -> None:
        try:
            self.store.cancel(job)
        except RequestError:
            assert self.store.job(job).state in ("done", "failed")

    @rule(job=jobs)
    def crash(self, job: str) -> None:
        self.store.retry_or_fail(job, "worker_crashed", "it died")

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        self.store.recover()
        assert self.store.count("running") == 0

    @invariant()
    def nothing_is_lost_and_ends_are_final(self) -> None:
        rows = {job.id: job for job in self.store.jobs(limit=10_000)}
        assert rows.keys() == self.known
        for name, state in self.final.items():
            assert rows[name].state == state
        for job in rows.values():
            ends = [event.type for event in self.store.events(job.id) if event.type in FINAL]
            assert ends == ([job.state] if job.final else [])
            assert job.attempts <= MAX_ATTEMPTS
            if job.final:
                self.final[job.id] = job.state

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()


class PostgresQueueMachine(QueueMachine):
    """The same with PostgreSQL."""

    address = ""

    def open(self) -> JobStore:
        return JobStore(Path(self._folder.name), database=PostgresDatabase(self.address))

    def teardown(self) -> None:
        self.store._db.execute("TRUNCATE jobs, events, settings, processes")
        super().teardown()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=sized(15, 1000), stateful_step_count=25, deadline=None)


def test_the_queue_in_postgresql(address: str) -> None:
    PostgresQueueMachine.address = address
    run_state_machine_as_test(PostgresQueueMachine, settings=TestQueue.settings)
