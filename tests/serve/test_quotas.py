"""Tokens of accounts, and their quotas: waiting jobs, train jobs, images and uploads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inweave.errors import ConfigError
from inweave.serve.jobs.accounts import Account, read_accounts
from inweave.serve.jobs.errors import QuotaError
from inweave.serve.jobs.job import Submission
from inweave.serve.jobs.store import JobStore
from inweave.serve.jobs.usage import DAY, HOUR, Usage
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
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[JobStore]:
        store = JobStore(tmp_path)
        yield store
        store.close()

    def submit(self, store: JobStore, usage: Usage, account: Account, submission: Submission) -> str:
        with usage.queueing(account, submission) as count:
            job, new = store.submit(submission)
            count(job, new)
        return job.id

    def test_images_of_a_day_and_when_they_are_free_again(self, store: JobStore) -> None:
        clock = Clock()
        usage = Usage(store.folder, store.job, clock=clock)
        account = Account(name="a", token="12345678", images_per_day=5)
        self.submit(store, usage, account, images(3))
        clock.now += 2 * HOUR
        self.submit(store, usage, account, images(2))
        with pytest.raises(QuotaError, match="images_per_day: 5 of 5 are used") as refusal:
            self.submit(store, usage, account, images(1))
        assert refusal.value.field == "images_per_day"
        usage.close()
        usage = Usage(store.folder, store.job, clock=clock)
        assert usage.used(account) == {"images_per_day": 5}, "after a restart"
        clock.now += refusal.value.seconds - 2
        with pytest.raises(QuotaError):
            self.submit(store, usage, account, images(1))
        clock.now += 2
        self.submit(store, usage, account, images(3))
        with pytest.raises(QuotaError) as refusal:
            self.submit(store, usage, account, images(6))
        assert refusal.value.seconds == DAY * HOUR, "it never has room for that"
        usage.close()

    def test_jobs_that_wait_and_train_jobs_until_they_end(self, store: JobStore) -> None:
        usage = Usage(store.folder, store.job)
        account = Account(name="a", token="12345678", queued_jobs=2, training_jobs=1)
        first = self.submit(store, usage, account, Submission("train", "m", {}))
        with pytest.raises(QuotaError, match="training_jobs: 1 of 1"):
            self.submit(store, usage, account, Submission("train", "m", {}))
        self.submit(store, usage, account, images(1))
        with pytest.raises(QuotaError, match="queued_jobs: 2 of 2"):
            self.submit(store, usage, account, images(1))
        claimed = store.claim()
        assert claimed is not None and claimed.id == first
        assert usage.used(account) == {"queued_jobs": 1, "training_jobs": 1}, "a train job counts while it runs"
        store.finish(first, "done", result={})
        store.delete(first)
        self.submit(store, usage, account, Submission("train", "m", {}))
        other = Account(name="b", token="87654321", queued_jobs=1)
        self.submit(store, usage, other, images(1))
        usage.close()

    def test_a_submission_that_fails_or_is_repeated_is_not_counted(self, store: JobStore) -> None:
        usage = Usage(store.folder, store.job)
        account = Account(name="a", token="12345678", images_per_day=2)
        with pytest.raises(sqlite3.Error), usage.queueing(account, images(2)):
            raise sqlite3.OperationalError("disk full")
        with usage.queueing(account, images(2)) as count:
            job, _ = store.submit(images(2))
            count(job, False)
        assert usage.used(account) == {"images_per_day": 0}
        usage.close()

    def test_bytes_of_bodies_that_arrive_at_once_share_a_quota(self, store: JobStore) -> None:
        usage = Usage(store.folder, store.job)
        account = Account(name="a", token="12345678", upload_gb_per_day=1000 / 1024**3)
        usage.arriving(account, 600)
        with pytest.raises(QuotaError):
            usage.arriving(account, 600)
        usage.arrived(account, 600)
        assert usage.refusal(account, 400) is None and usage.refusal(account, 401) is not None
        usage.close()


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
