"""Two stores on one database: only the holder of a lease writes, also after processes stopped or were cut off."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from inweave.errors import BusyError, ConfigError, ConflictError
from inweave.serve.engine.assignment import Assignments
from inweave.serve.jobs.blobs import FolderBlobs
from inweave.serve.jobs.errors import DatabaseLost
from inweave.serve.jobs.files import JobFiles
from inweave.serve.jobs.job import FINAL, MAX_ATTEMPTS, Event, Job, Submission
from inweave.serve.jobs.postgresql import IDLE_SECONDS, PostgresDatabase
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.training_runs import TrainingRuns, is_taken
from tests.serve.conftest import Open
from tests.serve.postgres import Postgres
from tests.serve.test_store import submission
from tests.support import sized

LEASE = 0.3


def opened(address: str, folder: Path, name: str, **options: Any) -> JobStore:
    """Return the store of one process; all of them share the files."""
    files = JobFiles(FolderBlobs(folder / "files"))
    database = PostgresDatabase(address)
    return JobStore(folder / name, database=database, files=files, **{"lease_seconds": LEASE, **options})


@pytest.fixture
def pair(address: str, tmp_path: Path) -> Any:
    stores = [opened(address, tmp_path, name) for name in ("one", "two")]
    for each in stores:
        each.keep_alive()
    yield stores
    for each in stores:
        each.close()


def alive_for(store: JobStore, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        store.keep_alive()
        time.sleep(LEASE / 5)


def test_the_job_of_a_process_that_says_nothing_runs_elsewhere_and_it_writes_nothing(pair: list[JobStore]) -> None:
    one, two = pair
    job = two.submit(submission())[0].id
    first = one.claim()
    assert first is not None and first.holder == one.name
    alive_for(two, 3 * LEASE)
    assert two.job(job).state == "queued"
    second = two.claim()
    assert second is not None and second.attempts == 2 and second.lease != first.lease
    one.keep_alive()  # it returns
    assert not one.holds(job, first.lease) and not one.append(job, Event("progress"), lease=first.lease)
    assert not one.finish(job, "done", result={}, lease=first.lease)
    assert one.retry_or_fail(job, "worker_crashed", "gone", lease=first.lease) == "running"
    one.put_back(job, lease=first.lease)
    assert two.finish(job, "done", result={"images": []}, lease=second.lease)
    assert [event.type for event in one.events(job)] == ["queued", "started", "retried", "started", "done"]


def test_a_process_that_runs_the_job_again_does_not_end_it_by_its_old_lease(pair: list[JobStore]) -> None:
    one, two = pair
    job = one.submit(submission())[0].id
    first = one.claim()
    alive_for(two, 3 * LEASE)
    again = one.claim()
    assert first is not None and again is not None and again.id == job
    assert not one.finish(job, "failed", lease=first.lease)
    assert one.finish(job, "done", result={}, lease=again.lease)


def test_a_process_that_lives_keeps_its_jobs(pair: list[JobStore]) -> None:
    one, two = pair
    one.submit(submission())
    job = one.claim()
    assert job is not None
    for _ in range(12):
        one.keep_alive()
        two.keep_alive()
        time.sleep(LEASE / 4)
    assert one.finish(job.id, "done", result={}, lease=job.lease)


def test_a_copy_of_a_data_folder_is_another_process(tmp_path: Path) -> None:
    first = JobStore(tmp_path / "one")
    name = first.name
    first.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    again, copy = JobStore(tmp_path / "one"), JobStore(tmp_path / "two")
    assert again.name == name != copy.name
    renamed = copy.name
    for each in (again, copy):
        each.close()
    (tmp_path / "two").rename(tmp_path / "moved")
    moved = JobStore(tmp_path / "moved")
    assert moved.name == renamed
    moved.close()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_of_the_database_that_jumps_takes_no_job(
    jump: float, pair: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    one.submit(submission())
    job = one.claim()
    assert job is not None and two.take_turn("sweep", 60.0)
    for each in (one, two):
        each.lease_seconds = 60.0
        each.keep_alive()
    two._connected = time.monotonic() - 2000
    for each in pair:
        real = each._db.now
        monkeypatch.setattr(each._db, "now", lambda real=real: real() + jump)
    two.keep_alive()
    assert one.holds(job.id, job.lease) and one.job(job.id).attempts == 1
    assert two.take_turn("sweep", 60.0) and not one.take_turn("sweep", 60.0)
    two.lease_seconds = LEASE
    alive_for(two, 3 * LEASE)
    assert two.job(job.id).state == "queued", "silence is noticed by any clock"


def test_after_an_outage_of_the_database_nobody_is_judged_for_a_lease(pair: list[JobStore]) -> None:
    one, two = pair
    one.submit(submission())
    job = one.claim()
    assert job is not None
    alive_for(two, LEASE / 2)
    time.sleep(3 * LEASE)  # neither reaches the database
    two.keep_alive()
    assert two.job(job.id).state == "running"
    one.keep_alive()
    alive_for(two, LEASE / 2)
    assert one.finish(job.id, "done", result={}, lease=job.lease)


def test_a_restarted_process_knows_its_jobs_at_once(address: str, tmp_path: Path) -> None:
    before = opened(address, tmp_path, "one", lease_seconds=60.0)
    before.keep_alive()
    job = before.submit(submission())[0].id
    before.claim()
    before.close()
    after = opened(address, tmp_path, "one", lease_seconds=60.0)
    after.recover()
    assert after.job(job).state == "queued"
    after.close()


def test_a_claim_whose_answer_was_lost_is_put_back(pair: list[JobStore]) -> None:
    one, _ = pair
    job = one.submit(submission())[0].id
    original = one._append

    def lost(*values: Any) -> None:
        original(*values)
        one._db.execute("COMMIT")
        raise DatabaseLost("gone after the commit")

    one._append = lost  # type: ignore[method-assign,assignment]
    with pytest.raises(DatabaseLost):
        one.claim()
    one._append = original  # type: ignore[method-assign]
    assert one.job(job).state == "running"
    one.keep_alive()
    assert (one.job(job).state, one.job(job).attempts) == ("queued", 0)


def test_an_event_is_stored_once_although_its_answer_was_lost(pair: list[JobStore]) -> None:
    one, _ = pair
    job = one.submit(submission())[0].id
    one.claim()
    for again in (False, True):
        assert one.append(job, Event("progress", {"step": 1}), again=again)
    assert one.append(job, Event("progress", {"step": 2}), again=True)
    assert [event.data.get("step") for event in one.events(job, after=2)] == [1, 2]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    answers: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            answers[number] = calls[number]()
        except Exception as error:
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return answers


def test_a_key_is_one_job_and_a_queue_has_its_limit_whoever_submits(address: str, tmp_path: Path) -> None:
    stores = [opened(address, tmp_path, name, queue_limit=5) for name in ("one", "two")]
    same = in_threads([partial(each.submit, submission(idempotency_key="k", fingerprint="f")) for each in stores * 6])
    assert len({job.id for job, _ in same}) == 1 and [new for _, new in same].count(True) == 1
    answers = in_threads([partial(each.submit, submission()) for each in stores * 6])
    assert sum(isinstance(each, BusyError) for each in answers) == 8 and stores[0].count("queued") == 5
    claimed = [job for job in in_threads([each.claim for each in stores * 6]) if isinstance(job, Job)]
    assert len({job.id for job in claimed}) == len(claimed) == 5
    for each in stores:
        each.close()


def test_events_of_many_writers_are_numbered_without_a_gap(pair: list[JobStore]) -> None:
    one, two = pair
    job = one.submit(submission())[0].id
    lease = one.claim().lease

    def write(store: JobStore, number: int) -> None:
        assert store.append(job, Event("progress", {"n": number}), lease=lease)

    in_threads([partial(write, store, number) for number in range(20) for store in pair])
    assert [event.number for event in two.events(job)] == list(range(1, 43))


def test_clients_take_turns_across_processes(pair: list[JobStore]) -> None:
    """A client whose job the other process runs had its turn."""
    slots = [Assignments(each).add("device") for each in pair]
    for slot in slots:
        slot.view.ready = True
    for client in ("many", "many", "few"):
        pair[0].submit(submission(client=client))
    assert slots[0].claim()[0].client == "many"
    assert slots[1].claim()[0].client == "few"


@pytest.mark.full
def test_a_transaction_of_a_process_that_stopped_holds_nobody_up(pair: list[JobStore], address: str) -> None:
    one, two = pair
    one.submit(submission())
    with pytest.raises(DatabaseLost), one._transaction(queue=True):
        started = time.monotonic()
        assert in_threads([lambda: two.submit(submission())])[0][1]
        assert IDLE_SECONDS - 1 < time.monotonic() - started < IDLE_SECONDS + 5
    assert one.count("queued") == 2


def test_connections_that_the_server_closed_are_replaced(pair: list[JobStore], address: str) -> None:
    one, _ = pair
    assert one.count("queued") == 0
    with psycopg.connect(address, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()")
    time.sleep(0.1)
    assert one.count("queued") == 0


def test_signals_reach_other_processes_also_after_a_restart(pair: list[JobStore], postgres: Postgres) -> None:
    one, two = pair
    texts: list[str] = []
    two.listen(texts.append)

    def arrives(text: str) -> bool:
        deadline = time.monotonic() + 5
        while text not in texts and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in texts

    assert arrives("")
    job = one.submit(submission())[0].id
    assert arrives(job) and arrives("work")
    texts.clear()
    postgres.restart()
    assert arrives("")
    one.cancel(job)
    assert arrives(job)


def test_periodic_work_is_done_by_one_of_them(pair: list[JobStore]) -> None:
    assert [each.take_turn("sweep", 0.3) for each in pair] == [True, False]
    time.sleep(0.35)
    assert [each.take_turn("sweep", 0.3) for each in pair[::-1]] == [True, False]


def test_text_with_nul_is_no_error(pair: list[JobStore]) -> None:
    assert pair[0].jobs(client="a\0b") == []


def test_a_training_run_is_left_to_the_process_that_took_it(pair: list[JobStore], tmp_path: Path) -> None:
    runs = TrainingRuns(tmp_path / "training")
    pair[0].submit(Submission("train", "m", {"config": {"name": "x"}}))
    first = pair[0].claim()
    assert first is not None and first.lease is not None
    folder = runs.take(first)
    assert not is_taken(folder, first.lease)
    alive_for(pair[1], 3 * LEASE)
    second = pair[1].claim()
    assert second is not None and second.lease is not None and runs.take(second) == folder
    assert is_taken(folder, first.lease) and not is_taken(folder, second.lease)


@pytest.mark.parametrize("address", ["postgresql://u:sec ret@host/d", "postgresql://u:secret@127.0.0.1:1/d"])
def test_a_database_that_cannot_be_used_is_one_line_without_the_password(address: str) -> None:
    with pytest.raises(ConfigError, match="--store: ") as error:
        PostgresDatabase(address)
    assert "\n" not in str(error.value) and "sec" not in str(error.value).replace("address of", "")


def test_workers_whose_folders_differ_are_refused(pair: list[JobStore], tmp_path: Path) -> None:
    one, two = pair
    one.ensure_same_folder("--blobs", tmp_path / "images")
    (tmp_path / "link").symlink_to(tmp_path / "images")
    two.ensure_same_folder("--blobs", tmp_path / "link")
    for other in (tmp_path / "elsewhere", tmp_path / "not mounted"):
        with pytest.raises(ConflictError, match=r"--blobs .* use another folder"):
            two.ensure_same_folder("--blobs", other)
        assert not (other / ".inweave-queue").exists()


def test_a_folder_of_another_queue_is_refused_and_loses_nothing(open_store: Open, tmp_path: Path) -> None:
    """A queue removes files that belong to none of its jobs: another one would lose them."""
    first, second = tmp_path / "first", tmp_path / "second"
    store = open_store(tmp_path / "one")
    for option, folder in (("--shared", first), ("--blobs", first), ("--shared", first)):
        store.ensure_same_folder(option, folder)
    if not store.shared:
        store.ensure_same_folder("--shared", second)  # at a later start
        store.ensure_same_folder("--shared", first)
    own = tmp_path / "two"
    other = JobStore(own)
    for option in ("--blobs", "--shared"):
        with pytest.raises(ConflictError, match=f"{option} .*another queue uses this folder"):
            other.ensure_same_folder(option, first)
        other.ensure_same_folder(option, own)
        assert not (own / ".inweave-queue").exists()
    (first / ".inweave-queue").unlink()
    other.ensure_same_folder("--shared", first)
    other.close()
    store.close()


class Processes(RuleBasedStateMachine):
    """Three processes that claim, end, stop, return and restart: each job ends once, under the lease of its row."""

    address = ""
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [self.open(number) for number in range(3)]
        self.claims: list[tuple[int, Job]] = []
        self.ends: dict[str, str] = {}
        self.known: set[str] = set()

    def open(self, number: int) -> JobStore:
        # a process is lost when the test says so, and not by the time that passes
        return opened(self.address, Path(self.folder.name), str(number), lease_seconds=1000.0)

    @rule(number=st.integers(0, 2))
    def submit(self, number: int) -> None:
        self.known.add(self.stores[number].submit(submission())[0].id)

    @rule(number=st.integers(0, 2))
    def claim(self, number: int) -> None:
        waiting = self.stores[0].count("queued")
        job = self.stores[number].claim()
        assert (job is None) == (waiting == 0)
        if job is not None:
            self.claims.append((number, job))

    @rule(which=st.integers(0, 50), state=st.sampled_from([*FINAL, "crash", "put back", "event"]))
    def write(self, which: int, state: str) -> None:
        """Write what became of any claim, also of one that was lost long ago."""
        if not self.claims:
            return
        number, job = self.claims[which % len(self.claims)]
        store, row = self.stores[number], self.stores[0].job(job.id)
        current = row.state == "running" and row.lease == job.lease
        before = [event.number for event in store.events(job.id)]
        if state == "crash":
            store.retry_or_fail(job.id, "worker_crashed", "it died", lease=job.lease)
        elif state == "put back":
            store.put_back(job.id, lease=job.lease)
        elif state == "event":
            assert store.append(job.id, Event("progress"), lease=job.lease) == current
        else:
            assert store.finish(job.id, state, lease=job.lease) == current  # type: ignore[arg-type]
        after = [event.number for event in store.events(job.id)]
        assert len(after) == len(before) + current and after == list(range(1, len(after) + 1))

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        """The others notice that a process says nothing."""
        name, witness = self.stores[number].name, self.stores[(number + 1) % 3]
        for each in self.stores:
            each.keep_alive()
        witness._db.execute("DELETE FROM processes WHERE id = ?", name)
        witness._connected = time.monotonic() - 2000
        witness.keep_alive()
        assert not any(job.holder == name for job in witness.jobs(states=("running",)))

    @rule(number=st.integers(0, 2))
    def restart(self, number: int) -> None:
        self.stores[number].close()
        self.stores[number] = self.open(number)
        self.stores[number].recover()

    @rule(job=st.integers(0, 50))
    def cancel(self, job: int) -> None:
        if self.known:
            name = sorted(self.known)[job % len(self.known)]
            if self.stores[0].job(name).state in ("queued", "running"):
                self.stores[1].cancel(name)

    @invariant()
    def nothing_is_lost_and_ends_are_final(self) -> None:
        rows = {job.id: job for job in self.stores[2].jobs(limit=1000)}
        assert rows.keys() == self.known
        for name, job in rows.items():
            assert job.attempts <= MAX_ATTEMPTS and (job.lease is not None) == (job.state == "running")
            assert self.ends.get(name, job.state) == job.state
            if job.final:
                self.ends[name] = job.state

    def teardown(self) -> None:
        self.stores[0]._db.execute("TRUNCATE jobs, events, settings, processes")
        for each in self.stores:
            each.close()
        self.folder.cleanup()


def test_processes_that_are_lost_and_return(address: str) -> None:
    Processes.address = address
    run_state_machine_as_test(
        Processes, settings=settings(max_examples=sized(5, 500), stateful_step_count=30, deadline=None)
    )
