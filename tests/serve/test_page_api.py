"""Calls of the page: the order of the queue, single images, settings of images, facts about models."""

from __future__ import annotations

import io
import itertools
import json
import random

from PIL import Image, PngImagePlugin

from inweave.serve.jobs.ordering import priorities_after_move
from tests.serve.worker import Worker


def order(rows: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return sorted(rows, key=lambda row: (-row[2], row[1]))


def test_any_job_can_be_moved_to_any_place() -> None:
    source = random.Random(3)
    for count, spread in itertools.product((1, 2, 3, 5, 9), (0, 1, 4)):
        for _ in range(20):
            rows = order([(f"job-{n}", n, source.randint(-spread, spread)) for n in source.sample(range(100), count)])
            name, position = source.choice(rows)[0], source.randint(0, count + 1)
            expected = [row[0] for row in rows if row[0] != name]
            expected.insert(min(position, count - 1), name)
            changes = priorities_after_move(rows, name, position)
            moved = order([(job, number, changes.get(job, priority)) for job, number, priority in rows])
            assert [row[0] for row in moved] == expected, (rows, name, position)
            assert len(changes) < count or count == 1


def test_a_waiting_job_is_moved_by_its_position(worker: Worker) -> None:
    worker.http.post("/v1/queue", json={"paused": True})
    try:
        jobs = [worker.submit(steps=1) for _ in range(3)]
        assert worker.http.patch(f"/v1/jobs/{jobs[2]}", json={"position": 0}).json()["position"] == 0
        assert [worker.job(job)["position"] for job in jobs] == [1, 2, 0]
        assert worker.http.patch(f"/v1/jobs/{jobs[2]}", json={"position": 99}).json()["position"] == 2
        assert [worker.job(job)["position"] for job in jobs] == [0, 1, 2]
        for wrong in ({}, {"position": -1}, {"position": 1, "priority": 1}, {"position": None}):
            assert worker.http.patch(f"/v1/jobs/{jobs[0]}", json=wrong).status_code == 400
        for job in jobs:
            worker.http.delete(f"/v1/jobs/{job}")
        assert worker.http.patch(f"/v1/jobs/{jobs[0]}", json={"position": 0}).status_code == 409
    finally:
        worker.http.post("/v1/queue", json={"paused": False})


def test_one_picture_of_a_job_is_deleted_and_the_job_with_the_last(worker: Worker) -> None:
    job = worker.submit(steps=1, count=2)
    urls = [image["url"] for image in worker.ended(job)["result"]["images"]]
    assert worker.http.delete(urls[0]).status_code == 200
    assert [image["url"] for image in worker.job(job)["result"]["images"]] == urls[1:]
    assert worker.http.get(urls[0]).status_code == 404 and worker.http.get(urls[1]).status_code == 200
    assert worker.http.delete(urls[0]).status_code == 404
    assert worker.http.delete(urls[1]).status_code == 200
    assert worker.http.get(f"/v1/jobs/{job}").status_code == 410


def test_a_picture_tells_what_made_it(worker: Worker) -> None:
    job = worker.ended(worker.submit(prompt="a red apple <lora:pixel:0.5>", seed=11, negative_prompt="blur"))
    picture = worker.http.get(job["result"]["images"][0]["url"]).content
    answer = worker.http.post("/v1/pictures/settings", content=picture).json()
    assert answer["settings"]["prompt"] == "a red apple <lora:pixel:0.5>" and answer["settings"]["seed"] == 11
    assert answer["settings"]["negative_prompt"] == "blur" and answer["warnings"] == []
    pixel = worker.http.get("/v1/loras/pixel").json()["id"]
    assert answer["loras"] == [{"reference": "pixel", "id": pixel, "name": "pixel"}]


def test_a_picture_of_another_program_names_what_is_missing_here(worker: Worker) -> None:
    text = (
        "a fox <lora:nosuch:1> <lora:renamed:0.5>\nNegative prompt: blur\nSteps: 9, "
        "Sampler: Euler a, CFG scale: 4, Seed: 5, "
        'Size: 128x128, Model: elsewhere, Lora hashes: "renamed: c08bb312ab9b"'
    )
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", text)
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, format="PNG", pnginfo=info)
    answer = worker.http.post("/v1/pictures/settings", content=content.getvalue()).json()
    assert answer["settings"]["steps"] == 9 and answer["settings"]["sampler"] == "euler_ancestral"
    assert [(lora["reference"], lora["name"], lora["id"] is None) for lora in answer["loras"]] == [
        ("nosuch", "nosuch", True),
        ("renamed", "pixel", False),  # by its hash
    ]
    messages = "\n".join(answer["warnings"])
    assert "LoRA nosuch" in messages and "elsewhere" in messages


def test_a_picture_without_settings_is_refused(worker: Worker) -> None:
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, format="PNG")
    for body in (content.getvalue(), b"hello", b"", b"\x89PNG\r\n\x1a\n"):
        answer = worker.http.post("/v1/pictures/settings", content=body)
        assert answer.status_code == 400 and "0x" not in json.dumps(answer.json()), answer.text


def test_models_tell_their_base_and_defaults(worker: Worker) -> None:
    model = worker.http.get("/v1/capabilities").json()["models"][0]
    assert model["base"] == "inweave/emoji" and model["defaults"]["size"] == 128 and model["defaults"]["steps"] > 0
