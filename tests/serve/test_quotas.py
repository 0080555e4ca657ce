"""Tokens of accounts, and their quotas: waiting jobs, train jobs, images and uploads."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inweave.errors import ConfigError
from inweave.serve.jobs.accounts import Account, read_accounts
from inweave.serve.jobs.errors import QuotaError
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.postgresql import PostgresDatabase
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.usage import DAY, HOUR, Usage
from inweave.serve.scheduler.scheduler import fair_order
from inweave.serve.settings import ServeSettings
from tests.serve.worker import SMALL, Worker

TOKENS = """
[small]
token = "token-of-small"
queued_jobs = 2
images_per_day = 4
training_jobs = 0
upload_gb_per_day = 0.0001  # 107,374 bytes

[large]
token = "token-of-large"
"""


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def images(count: int) -> Submission:
    return Submission("image_generation", "m", {"config": {"count": count}})


class TestUsage:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def opened(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., tuple[JobStore, Usage]]]:
        """Yield how one more web process is opened; with PostgreSQL each has a folder of its own."""
        shared = request.getfixturevalue("address") if request.param == "postgresql" else None
        processes: list[tuple[JobStore, Usage]] = []

        def open_process(clock: Callable[[], float] = time.time) -> tuple[JobStore, Usage]:
            if shared is None and processes:
                for part in processes.pop():
                    part.close()
            database = None if shared is None else PostgresDatabase(shared)
            folder = tmp_path if shared is None else tmp_path / str(len(processes))
            store = JobStore(folder, database=database)
            processes.append((store, Usage(folder, store.count_of, clock=clock, database=database)))
            return processes[-1]

        yield open_process
        for process in processes:
            for part in process:
                part.close()

    def submit(self, process: tuple[JobStore, Usage], account: Account, submission: Submission) -> str:
        store, usage = process
        submission = replace(submission, account=account.name)
        return store.submit(submission, usage.admission(account, submission))[0].id

    def test_images_of_a_day_and_when_they_are_free_again(self, opened: Callable[..., tuple[JobStore, Usage]]) -> None:
        clock = Clock()
        process = opened(clock)
        account = Account(name="a", token="12345678", images_per_day=5)
        self.submit(process, account, images(3))
        clock.now += 2 * HOUR
        self.submit(process, account, images(2))
        with pytest.raises(QuotaError, match="images_per_day: 5 of 5 are used") as refusal:
            self.submit(process, account, images(1))
        assert refusal.value.field == "images_per_day"
        process = opened(clock)
        assert process[1].used(account) == {"images_per_day": 5}, "after a restart, or in another process"
        clock.now += refusal.value.seconds - 2
        with pytest.raises(QuotaError):
            self.submit(process, account, images(1))
        clock.now += 2
        self.submit(process, account, images(3))
        with pytest.raises(QuotaError) as refusal:
            self.submit(process, account, images(6))
        assert refusal.value.seconds == DAY * HOUR, "it never has room for that"

    def test_jobs_that_wait_and_train_jobs_until_they_end(self, opened: Callable[..., tuple[JobStore, Usage]]) -> None:
        process = opened()
        account = Account(name="a", token="12345678", queued_jobs=2, training_jobs=1)
        first = self.submit(process, account, Submission("train", "m", {}))
        process = opened()
        store, usage = process
        with pytest.raises(QuotaError, match="training_jobs: 1 of 1"):
            self.submit(process, account, Submission("train", "m", {}))
        self.submit(process, account, images(1))
        with pytest.raises(QuotaError, match="queued_jobs: 2 of 2"):
            self.submit(process, account, images(1))
        claimed = store.claim()
        assert claimed is not None and claimed.id == first
        assert usage.used(account) == {"queued_jobs": 1, "training_jobs": 1}, "a train job counts while it runs"
        store.finish(first, "done", result={})
        store.delete(first)
        self.submit(process, account, Submission("train", "m", {}))
        other = Account(name="b", token="87654321", queued_jobs=1)
        self.submit(process, other, images(1))

    def test_submissions_at_once_never_exceed_a_quota(self, opened: Callable[..., tuple[JobStore, Usage]]) -> None:
        first = opened()
        processes = [first, opened() if first[0].shared else first]
        account = Account(name="a", token="12345678", queued_jobs=5, images_per_day=100)

        def submit(number: int) -> bool:
            with contextlib.suppress(QuotaError):
                self.submit(processes[number % 2], account, images(1))
                return True
            return False

        with ThreadPoolExecutor(8) as pool:
            refusals = [*pool.map(submit, range(20))].count(False)
        assert refusals == 15 and processes[0][1].used(account) == {"queued_jobs": 5, "images_per_day": 5}

    def test_a_submission_that_fails_or_is_repeated_is_not_counted(
        self, opened: Callable[..., tuple[JobStore, Usage]]
    ) -> None:
        store, usage = opened()
        account = Account(name="a", token="12345678", images_per_day=2)
        with pytest.raises(sqlite3.Error), usage.admission(account, images(2)):
            raise sqlite3.OperationalError("disk full")
        assert usage.used(account) == {"images_per_day": 0}
        submission = replace(images(2), idempotency_key="k", account="a")
        jobs = {store.submit(submission, usage.admission(account, submission))[0].id for _ in range(3)}
        assert len(jobs) == 1 and usage.used(account) == {"images_per_day": 2}

    def test_bytes_of_bodies_that_arrive_at_once_share_a_quota(
        self, opened: Callable[..., tuple[JobStore, Usage]]
    ) -> None:
        clock = Clock()
        usage = opened(clock)[1]
        account = Account(name="a", token="12345678", upload_gb_per_day=1000 / 1024**3)
        size, hour = usage.reserve(account, 600)
        usage = opened(clock)[1]
        with pytest.raises(QuotaError):
            usage.reserve(account, 600)
        assert usage.reserve(account, 1, 5000) == (400, hour), "as much as there is room for"
        clock.now += HOUR
        usage.give_back(account, size, hour)
        assert usage.used(account) == {"upload_gb_per_day": 400}
        clock.now += DAY * HOUR
        with pytest.raises(QuotaError):
            usage.reserve(account, 1001)


def test_jobs_of_one_account_share_its_turns_whatever_clients_call_themselves(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    for client in ("a: x", "a: y", "a: z"):
        store.submit(Submission("image_generation", "m", {}, client=client, account="a"))
    for client in ("account a", "b: x"):
        store.submit(Submission("image_generation", "m", {}, client=client))
    order = [job.number for job in fair_order(store.candidates(10))]
    store.close()
    assert order == [1, 4, 5, 2, 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no account"), ("a = 1", "expected a table"), ("[a]\nimages_per_day = 1", "a text of 8"),
        ('[a]\ntoken = "hush-42"', "a text of 8"), ('[a]\ntoken = "hush-42-hush', "not a TOML file"),
        ('[a]\ntoken = "hush-42-hush"\nimages_per_day = -1', "images_per_day"),
        ('[a]\ntoken = "hush-42-hush"\nimages_a_day = 1', "images_a_day"),
        ('["a b"]\ntoken = "hush-42-hush"', "name"),
        ('[a]\ntoken = "hush-42-hush"\n[b]\ntoken = "hush-42-hush"', "the same token"),
    ],
)  # fmt: skip
def test_a_file_of_tokens_that_is_wrong_is_refused_without_its_tokens(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "tokens.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_accounts(tmp_path / "tokens.toml")
    assert problem in str(error.value) and "hush" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_accounts(tmp_path / "none.toml")


def test_a_file_of_tokens_is_enough_for_an_open_address(tmp_path: Path) -> None:
    assert ServeSettings(host="0.0.0.0", tokens=tmp_path / "t").needs_token


def test_quotas_over_http(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(TOKENS)
    worker = Worker(tmp_path / "data", "--tokens", str(tmp_path / "tokens.toml"), token="token-without-limits")
    worker.start()
    try:
        small, large, wrong = (
            httpx.Client(base_url=worker.url, timeout=60, headers={"Authorization": f"Bearer {token}"})
            for token in ("token-of-small", "token-of-large", "another-token")
        )
        job = {"prompt": "x", **SMALL}
        assert wrong.get("/v1/queue").status_code == 401
        assert large.get("/v1/session").json() == {"token_required": True, "account": "large", "quotas": {}}
        assert worker.http.get("/v1/session").json() == {"token_required": True}
        worker.http.post("/v1/queue", json={"paused": True})
        submitted = [small.post("/v1/jobs", json=job, headers={"Idempotency-Key": "k"}) for _ in range(3)]
        assert [answer.status_code for answer in submitted] == [202] * 3, "repeated submissions are one job"
        assert small.post("/v1/jobs", json=job).status_code == 202
        refused = small.post("/v1/jobs", json=job)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "5"
        assert refused.json()["error"]["code"] == "quota" and "queued_jobs: 2 of 2" in refused.text
        assert large.post("/v1/jobs", json=job).status_code == 202
        text2img = small.post("/sdapi/v1/txt2img", json=job)
        assert text2img.status_code == 429 and "queued_jobs" in text2img.text, "in every API"
        assert small.post("/v1/images/generations", json={"prompt": "x"}).status_code == 429
        worker.http.post("/v1/queue", json={"paused": False})
        worker.ended(submitted[0].json()["id"])
        worker.until(lambda: worker.queued() == 0)
        assert small.post("/v1/jobs", json={**job, "count": 2}).status_code == 202
        refused = small.post("/v1/jobs", json=job)
        assert "images_per_day: 4 of 4" in refused.text and 0 < int(refused.headers["Retry-After"]) <= DAY * HOUR
        big = small.post("/v1/uploads", content=b"x" * 110_000)
        assert big.status_code == 429 and "upload_gb_per_day" in big.text and int(big.headers["Retry-After"]) > 0
        pieces = small.post("/v1/uploads", content=(b"x" * 11_000 for _ in range(10)))
        assert pieces.status_code == 429, "without a declared length too"
        assert large.post("/v1/uploads", content=b"x" * 110_000).status_code == 400, "not an image"
        document = small.get("/v1/session").json()
        assert document["quotas"]["images_per_day"] == {"limit": 4, "used": 4}
        cookie = small.post("/v1/session").cookies
        browser = httpx.Client(base_url=worker.url, cookies=cookie)
        assert browser.get("/v1/session").json()["account"] == "small"
        metrics = text_string_to_metric_families(worker.http.get("/metrics").text)
        refusals = {
            (sample.labels["account"], sample.labels["quota"]): sample.value
            for family in metrics if family.name == "inweave_quota_refusals" for sample in family.samples
        }  # fmt: skip
        assert 'route="/v1/jobs"' in worker.http.get("/metrics").text
        assert refusals["small", "queued_jobs"] == 3 and refusals["small", "images_per_day"] == 1
    finally:
        worker.stop()
