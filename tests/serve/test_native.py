"""The native API, against a real worker."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave import pipeline
from inweave.serve.api import event_streams as streams
from tests.serve.worker import SMALL, Worker
from tests.support import figure


def picture(color: str = "red", size: tuple[int, int] = (128, 128)) -> str:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format="PNG")
    return base64.b64encode(content.getvalue()).decode()


def test_a_job_gives_the_image_that_the_library_gives(worker: Worker) -> None:
    job = worker.submit(seed=7, loras=[{"name": "pixel", "strength": 0.8}])
    document = worker.ended(job)
    assert document["state"] == "done", document["error"]
    answer = worker.http.get(document["result"]["images"][0]["url"])
    assert answer.headers["content-type"] == "image/png"
    expected = pipeline("inweave/emoji")("a red apple", steps=2, seed=7, loras=["pixel:0.8"]).images[0]
    assert Image.open(io.BytesIO(answer.content)).tobytes() == expected.tobytes()
    lora = document["result"]["loras"][0]
    assert lora["strength"] == lora["te"] == lora["unet"] == 0.8
    assert lora["name"] == "pixel" and lora["modules"] == 100 and len(lora["sha256"]) == 64


def test_the_time_of_each_lora_adds_up(worker: Worker) -> None:
    """The cost of a stack is reported per LoRA, once; the same stack again costs less."""
    stack = [{"name": "ink", "strength": 0.21}, {"name": "pixel", "strength": 0.43}]
    results = [worker.ended(worker.submit(loras=stack, **SMALL))["result"] for _ in range(3)]
    times = [[lora["apply_seconds"] for lora in result["loras"]] for result in results]
    assert all(seconds > 0 for each in times for seconds in each)
    assert all(sum(each) < result["seconds"] for each, result in zip(times, results, strict=True))
    assert min(sum(times[1]), sum(times[2])) < sum(times[0])
    figure(f"apply_seconds of {[each['name'] for each in stack]}: {times[0]}, of the same stack again {times[1]}")


def test_events_are_numbered_and_resume_anywhere(worker: Worker) -> None:
    job = worker.submit(steps=3, preview_every=1)
    whole = list(worker.events(job))
    assert [event["event"] for event in whole] == list(range(1, len(whole) + 1))
    assert whole[0]["type"] == "queued" and whole[-1]["type"] == "done"
    assert {event["type"] for event in whole} >= {"started", "progress", "preview", "image"}
    for cut in range(len(whole)):
        assert whole[:cut] + list(worker.events(job, cut)) == whole


@pytest.mark.parametrize("path", ["events", "stream"])
def test_a_stream_that_is_cut_after_every_event_is_the_whole_stream(worker: Worker, path: str) -> None:
    """While the job runs: each connection reads one event and ends, the next one continues."""
    job = worker.submit(width=64, height=64, steps=6, preview_every=2)
    pieces: list[dict[str, object]] = []
    last: int | None = None
    while not pieces or pieces[-1]["type"] not in ("done", "complete", "failed", "error"):
        number, event = next(worker.numbered_events(job, last, path))
        pieces.append(event)
        last = number
    whole = list(worker.events(job, path=path))
    assert pieces == whole and len(whole) >= 7
    figure(f"/{path} cut and rejoined after each of {len(whole)} events of a running job: the same stream")


def test_a_stream_without_news_is_kept_alive(worker: Worker) -> None:
    """`ping` lines come more often than proxies give up."""
    assert streams.HEARTBEAT <= 15
    response = streams.event_stream(None, None, 0, streams.native)  # type: ignore[arg-type]
    assert response.ping_interval == streams.HEARTBEAT


def test_a_running_job_is_cancelled_within_a_step(worker: Worker) -> None:
    job = worker.submit(steps=150)
    events = worker.events(job)
    for event in events:
        if event["type"] == "progress":
            break
    answer = worker.http.delete(f"/v1/jobs/{job}")
    assert answer.status_code == 200
    rest = [event["type"] for event in events]
    assert rest[-1] == "cancelled" and len(rest) < 10
    assert worker.http.delete(f"/v1/jobs/{job}").json()["status"] == "cancelled"  # twice is not an error


def test_a_finished_job_cannot_be_cancelled(worker: Worker) -> None:
    job = worker.submit(steps=1)
    worker.ended(job)
    assert worker.http.delete(f"/v1/jobs/{job}").status_code == 409


def test_the_same_idempotency_key_is_one_job(worker: Worker) -> None:
    body = {"prompt": "a red apple", "steps": 1}
    first, second = (
        worker.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k1"}).json()["id"] for _ in range(2)
    )
    assert first == second
    other = worker.http.post("/v1/jobs", json=body | {"steps": 2}, headers={"Idempotency-Key": "k1"})
    assert other.status_code == 409


def test_image_to_image_and_inpainting(worker: Worker) -> None:
    changed = worker.ended(worker.submit(operation="image_transform", image=picture(), strength=0.5))
    assert changed["state"] == "done", changed["error"]
    mask = io.BytesIO()
    half = Image.new("L", (128, 128), 0)
    half.paste(255, (0, 0, 64, 128))
    half.save(mask, format="PNG")
    inpainted = worker.submit(
        operation="image_inpaint", image=picture("blue"), mask_image=base64.b64encode(mask.getvalue()).decode()
    )
    document = worker.ended(inpainted)
    assert document["state"] == "done", document["error"]
    image = Image.open(io.BytesIO(worker.http.get(document["result"]["images"][0]["url"]).content))
    assert image.crop((64, 0, 128, 128)).tobytes() == Image.new("RGB", (64, 128), "blue").tobytes()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": 7}, 400, "invalid_request"),
        ({"prompt": "x", "steps": 0, "guidance": -1}, 400, "invalid_request"),
        ({"prompt": "x", "loras": ["nosuch"]}, 404, "not_found"),
        ({"prompt": "x <lora:nosuch:1>"}, 404, "not_found"),
        ({"prompt": "x", "model": "nosuch"}, 404, "not_found"),
        ({"prompt": "x", "loras": [{"path": "/etc/passwd"}]}, 404, "not_found"),
        ({"prompt": "x", "operation": "image_transform"}, 400, "invalid_request"),
        ({"prompt": "x", "operation": "image_transform", "image": "http://localhost/x.png"}, 400, "invalid_request"),
        ({"prompt": "x", "operation": "image_transform", "image": "aGVsbG8="}, 400, "invalid_request"),
        ({"prompt": "x", "operation": "reboot"}, 400, "invalid_request"),
        ([], 400, "invalid_request"),
    ],
)
def test_wrong_requests_are_refused_before_they_are_queued(
    worker: Worker, body: object, status: int, code: str
) -> None:
    answer = worker.http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_an_operation_that_there_is_not_names_those_that_there_are(worker: Worker) -> None:
    for name in ("operation", "kind"):
        message = worker.http.post("/v1/jobs", json={"prompt": "x", name: "reboot"}).json()["error"]["message"]
        assert all(
            each in message for each in ("image_generation", "image_transform", "image_inpaint", "train", "reboot")
        )
        assert "dataset" in worker.http.post("/v1/jobs", json={name: "train"}).json()["error"]["message"]


def test_an_unknown_job_is_missing(worker: Worker) -> None:
    for path in ("", "/events", "/stream", "/files/0.png"):
        assert worker.http.get(f"/v1/jobs/job-0{path}").status_code == 404


def test_rbee_clients_get_their_own_words(worker: Worker) -> None:
    body = {
        "operation": "image_generation", "hive_id": "localhost", "model": "inweave/emoji", "prompt": "a red apple",
        "negative_prompt": None, "steps": 2, "guidance_scale": 3.0, "seed": None, "width": 128, "height": 128,
        "loras": [{"path": "pixel.safetensors", "strength": 0.5}], "worker_id": None,
    }  # fmt: skip
    answer = worker.http.post("/v1/jobs", json=body)
    assert answer.status_code == 200, answer.text
    job = answer.json()["job_id"]
    assert answer.json() == {"job_id": job, "sse_url": f"/v1/jobs/{job}/stream"}
    events = list(worker.events(job, path="stream"))
    assert [event["type"] for event in events] == ["preview", "preview", "complete"]
    assert {**events[0], "image": 1} == {
        "type": "preview",
        "step": 1,
        "total": 2,
        "percent": 50.0,
        "image": 1,
        "format": "png",
    }
    assert Image.open(io.BytesIO(base64.b64decode(events[-1]["image"]))).size == (128, 128)


def test_health_readiness_capabilities_and_metrics(worker: Worker) -> None:
    assert worker.http.get("/health").json()["status"] == "healthy"
    assert worker.http.get("/v1/ready").json()["ready"] is True
    info = worker.http.get("/info").json()
    assert info["model_id"] == "inweave/emoji" and re.fullmatch("(CPU|GPU)-0", info["device"])
    assert "image_inpaint" in worker.http.get("/v1/capabilities").json()["operations"]
    assert 'inweave_jobs{state="queued"}' in worker.http.get("/metrics").text


def test_the_address_answers_at_once_and_says_why_it_is_not_ready(worker: Worker) -> None:
    """A model process takes seconds to import torch: the first answers were given before."""
    first = worker.first_answers
    assert first["GET /health"].status_code == 200 and first["GET /health"].json()["status"] == "healthy"
    assert first["GET /ready"].status_code == 503
    assert first["GET /ready"].json()["ready"] is False and "model" in first["GET /ready"].json()["reason"]
    assert (first["HEAD /health"].status_code, first["HEAD /ready"].status_code) == (200, 503)
    assert "inweave_ready 0.0" in first["GET /metrics"].text


def test_head_answers_as_get_does_without_the_body(worker: Worker) -> None:
    job = worker.ended(worker.submit(**SMALL))
    for path in ("/health", "/ready", "/v1/ready", "/", job["result"]["images"][0]["url"], "/v1/loras/pixel/file"):
        head, get = worker.http.head(path), worker.http.get(path)
        assert head.status_code == get.status_code == 200 and head.content == b"", path
        assert head.headers["content-length"] == get.headers["content-length"] != "0", path


def test_the_web_process_never_loads_torch(worker: Worker) -> None:
    """Also after jobs, checks and training requests: of torch it would map libtorch."""
    worker.ended(worker.submit(loras=["pixel"], **SMALL))
    worker.http.post("/v1/loras/check", json={"lora": "pixel"})
    train = {"operation": "train", "dataset": "inweave/pixel", "name": "x", "settings": {"steps": "many"}}
    assert worker.http.post("/v1/jobs", json=train).status_code == 400
    assert worker.process is not None

    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in libraries(worker.model_pids()[0])
    for pid in (worker.process.pid, *worker.child_pids("inweave.serve.sandbox.process")):
        assert "python" in libraries(pid) and "libtorch" not in libraries(pid)


def test_jobs_are_listed_page_by_page(worker: Worker) -> None:
    """Newest first; jobs that are submitted meanwhile move nothing."""
    worker.http.post("/v1/queue", json={"paused": True})
    try:
        jobs = [worker.submit(**SMALL) for _ in range(5)]
        pages: list[list[str]] = []
        before: int | None = None
        while True:
            query: dict[str, Any] = {"limit": 2, "state": "queued"} | ({} if before is None else {"before": before})
            page = worker.http.get("/v1/jobs", params=query).json()
            pages.append([job["id"] for job in page["jobs"]])
            before = page["next"]
            if before is None:
                break
            worker.submit(**SMALL)
        listed = [job for page in pages for job in page]
        assert listed[:5] == jobs[::-1] and len(listed) == len(set(listed)) and page["paused"]
        assert all(len(page) == 2 for page in pages[:-1])
        queued = worker.http.get("/v1/jobs", params={"limit": 200, "state": "queued"}).json()["jobs"]
        for wrong in ({"before": "x"}, {"before": -1}, {"limit": 0}, {"limit": 201}, {"state": "asleep"}):
            assert worker.http.get("/v1/jobs", params=wrong).status_code == 400, wrong
        for job in queued:
            worker.http.delete(f"/v1/jobs/{job['id']}")
    finally:
        worker.http.post("/v1/queue", json={"paused": False})


def test_the_queue_tells_what_runs_and_waits_in_order(worker: Worker) -> None:
    running = worker.submit(steps=150)
    worker.running(running)
    waiting = [worker.submit(**SMALL, priority=priority) for priority in (0, 2, 1)]
    try:
        queue = worker.http.get("/v1/queue").json()
        assert [job["id"] for job in queue["running"]] == [running] and not queue["paused"]
        assert [job["id"] for job in queue["waiting"]] == [waiting[1], waiting[2], waiting[0]]
        assert [job["position"] for job in queue["waiting"]] == [0, 1, 2]
        assert queue["length"] == 3 and queue["limit"] == 1000
        short = worker.http.get("/v1/queue", params={"limit": 1}).json()
        assert [job["id"] for job in short["waiting"]] == [waiting[1]] and short["length"] == 3
    finally:
        for job in (*waiting, running):
            worker.http.delete(f"/v1/jobs/{job}")
    worker.ended(running)
    assert worker.http.get("/v1/queue").json()["waiting"] == []


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "application/merge-patch+json", None, "text/plain"]
)
def test_bodies_are_json_as_curl_sends_them_or_refused_with_what_to_do(worker: Worker, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    for path, body in (("/v1/queue", b'{"paused": false}'), ("/v1/loras/check", b'{"lora": "pixel"}')):
        answer = worker.http.post(path, content=body, headers=headers)
        if kind == "text/plain":
            assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200, answer.text
        for wrong in (b"paused=true", b'{"paused": NaN}', b'{"paused": false, "paused": true}', b"", b"[]"):
            assert worker.http.post(path, content=wrong, headers=headers).status_code in (400, 415)
    assert not worker.http.get("/v1/queue").json()["paused"]


def test_metrics_count_jobs_that_are_kept(worker: Worker) -> None:
    def done() -> float:
        match = re.search(r'^inweave_jobs{state="done"} (\S+)$', worker.http.get("/metrics").text, re.MULTILINE)
        assert match is not None
        return float(match[1])

    job = worker.ended(worker.submit(**SMALL))["id"]
    before = done()
    assert worker.http.delete(f"/v1/jobs/{job}", params={"forget": True}).status_code == 200
    assert done() == before - 1


def test_the_library_is_listed_and_checked(worker: Worker) -> None:
    names = {lora["name"] for lora in worker.http.get("/v1/loras").json()["loras"]}
    assert names >= {"pixel", "ink"}
    assert worker.http.get("/v1/loras/pixel").json()["base"] == "inweave/emoji"
    verdict = worker.http.post("/v1/loras/check", json={"lora": "pixel"}).json()["verdict"]
    assert verdict["ok"] and verdict["placed"] == verdict["tensors"]


def test_the_queue_is_paused_reordered_and_retried(worker: Worker) -> None:
    worker.http.post("/v1/queue", json={"paused": True})
    try:
        first, second = worker.submit(steps=1), worker.submit(steps=1)
        assert worker.job(first)["position"] == 0 and worker.job(second)["position"] == 1
        worker.http.patch(f"/v1/jobs/{second}", json={"priority": 5})
        assert worker.job(second)["position"] == 0
        assert worker.http.delete(f"/v1/jobs/{first}").json()["status"] == "cancelled"
    finally:
        worker.http.post("/v1/queue", json={"paused": False})
    assert worker.ended(second)["state"] == "done"
    again = worker.http.post(f"/v1/jobs/{first}/retry").json()["id"]
    assert worker.ended(again)["state"] == "done"
