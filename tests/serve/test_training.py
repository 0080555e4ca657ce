"""Train jobs: from images to a LoRA that the same worker generates with."""

from __future__ import annotations

import io

from PIL import Image

from tests.serve.worker import Worker


def test_a_dataset_is_uploaded_trained_on_and_used(worker: Worker) -> None:
    dataset = worker.http.post("/v1/datasets", json={"name": "squares"}).json()["id"]
    for number, color in enumerate(("red", "green")):
        content = io.BytesIO()
        Image.new("RGB", (128, 128), color).save(content, format="JPEG")
        stored = worker.http.put(f"/v1/datasets/{dataset}/pictures/square {number}.jpg", content=content.getvalue())
        assert stored.json() == {"name": f"square {number}.png"}
        caption = worker.http.put(
            f"/v1/datasets/{dataset}/captions/square {number}", json={"caption": f"a {color} square"}
        )
        assert caption.status_code == 200
    assert len(worker.http.get(f"/v1/datasets/{dataset}").json()["pictures"]) == 2
    body = {
        "operation": "train",
        "dataset": dataset,
        "name": "squares",
        "settings": {"steps": 2, "rank": 2, "log_every": 1},
    }
    answer = worker.http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job = worker.ended(answer.json()["id"])
    assert job["state"] == "done", job["error"]
    losses = [event["loss"] for event in worker.events(job["id"]) if event["type"] == "progress"]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    used = worker.ended(worker.submit(loras=["squares"]))
    assert used["result"]["loras"][0]["name"] == "squares"


def test_wrong_train_requests_are_refused(worker: Worker) -> None:
    good = {"operation": "train", "dataset": "inweave/pixel", "name": "x", "settings": {}}
    for change, status in (
        ({"dataset": "dataset-0000000000000000"}, 404),
        ({"dataset": "/etc"}, 404),
        ({"name": "../x"}, 400),
        ({"settings": {"output": "/tmp/x"}}, 400),
        ({"settings": {"rank": -1, "steps": "many"}}, 400),
        ({"settings": {"sample_prompts": ["/etc/passwd.txt"]}}, 400),
        ({"start_from": "nosuch"}, 404),
    ):
        answer = worker.http.post("/v1/jobs", json=good | change)
        assert answer.status_code == status, (change, answer.text)


def test_hostile_images_and_names_are_refused(worker: Worker) -> None:
    dataset = worker.http.post("/v1/datasets", json={}).json()["id"]
    assert worker.http.put(f"/v1/datasets/{dataset}/pictures/a.png", content=b"%!PS-Adobe-3.0 EPSF").status_code == 400
    for name in ("..%2f..%2fx", ".hidden", "a%00b", "%3Cimg%3E"):
        content = io.BytesIO()
        Image.new("RGB", (8, 8)).save(content, format="PNG")
        assert worker.http.put(f"/v1/datasets/{dataset}/pictures/{name}", content=content.getvalue()).status_code in (
            400,
            404,
        )
    assert worker.http.get(f"/v1/datasets/{dataset}").json()["pictures"] == []
