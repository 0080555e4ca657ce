"""Datasets, plans and runs over HTTP: everything the page does for training, as any client does it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save_file

from inweave.errors import ConflictError, MissingError, RequestError
from inweave.serve.jobs.job import Job
from inweave.serve.jobs.training_runs import TrainingRuns, add_to_library
from inweave.serve.planner.client import PlannerClient
from inweave.serve.service.training import RESERVED
from inweave.serve.service.training_limits import ITEMS, LIMITS, limit_problems
from inweave.serve.storage import datasets
from inweave.serve.storage.datasets import DatasetStore
from inweave.training.config.fields import TrainSettings
from inweave.training.data.buckets import BucketRules, assign
from tests.serve.worker import Worker
from tests.support import sized

SIZES = {"square": (128, 128), "wide one": (400, 200), "tall": (100, 300), "tiny": (20, 20)}
#: a run that costs next to nothing
TINY: dict[str, Any] = {"rank": 2, "batch_size": 1, "log_every": 1, "lr_scheduler": "constant", "warmup": 0}


def png(size: tuple[int, int], color: str = "red") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, format="PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def dataset(worker: Worker) -> str:
    """Four images with captions."""
    name = str(worker.http.post("/v1/datasets", json={"name": "shapes"}).json()["id"])
    for stem, size in SIZES.items():
        assert worker.http.put(f"/v1/datasets/{name}/pictures/{stem}.png", content=png(size)).status_code == 200
    captions = {f"{stem}.png": f"a {stem}" for stem in SIZES}
    assert worker.http.patch(f"/v1/datasets/{name}/captions", json={"captions": captions}).json()["changed"] == 4
    return name


def test_captions_are_changed_together_or_not_at_all(worker: Worker, dataset: str) -> None:
    address = f"/v1/datasets/{dataset}/captions"
    answer = worker.http.patch(address, json={"captions": {"square.png": "one", "tall": "two"}})
    assert answer.json() == {"changed": 2, "before": {"square.png": "a square", "tall.png": "a tall"}}
    assert worker.http.patch(address, json={"captions": {"square": "three", "nosuch": "x"}}).status_code == 404
    assert worker.http.patch(address, json={"captions": {"square": "x" * 20_001}}).status_code == 400
    assert worker.http.patch(address, json={"captions": {}}).status_code == 400
    texts = {row["name"]: row["caption"] for row in worker.http.get(f"/v1/datasets/{dataset}").json()["pictures"]}
    assert texts["square.png"] == "one" and texts["tall.png"] == "two"
    worker.http.patch(address, json={"captions": answer.json()["before"]})
    texts = {row["name"]: row["caption"] for row in worker.http.get(f"/v1/datasets/{dataset}").json()["pictures"]}
    assert texts["square.png"] == "a square" and texts["tall.png"] == "a tall"


def test_datasets_are_named_listed_and_shown_small(worker: Worker, dataset: str) -> None:
    assert worker.http.patch(f"/v1/datasets/{dataset}", json={"name": "other"}).json()["name"] == "other"
    rows = {row["id"]: row for row in worker.http.get("/v1/datasets").json()["datasets"]}
    assert rows[dataset]["pictures"] == 4 and rows[dataset]["first"] == "square.png"
    assert rows["inweave/pixel"]["built_in"]
    described = worker.http.get(f"/v1/datasets/{dataset}").json()["pictures"]
    assert [(row["width"], row["height"]) for row in described if row["name"] == "wide one.png"] == [(400, 200)]
    small = worker.http.get(f"/v1/datasets/{dataset}/pictures/wide one.png", params={"thumbnail": True, "v": "1"})
    assert small.headers["content-type"] == "image/webp" and "max-age" in small.headers["cache-control"]
    assert max(Image.open(io.BytesIO(small.content)).size) == datasets.THUMBNAIL
    # another image of the same name has another thumbnail
    worker.http.put(f"/v1/datasets/{dataset}/pictures/wide one.jpg", content=png((640, 320), "blue"))
    again = worker.http.get(f"/v1/datasets/{dataset}/pictures/wide one.png", params={"thumbnail": True})
    assert again.content != small.content
    worker.http.put(f"/v1/datasets/{dataset}/pictures/wide one.png", content=png((400, 200)))
    pixel = worker.http.get("/v1/datasets/inweave/pixel").json()["pictures"][0]["name"]
    assert worker.http.get(f"/v1/datasets/inweave/pixel/pictures/{pixel}?thumbnail=1").status_code == 200
    assert worker.http.patch("/v1/datasets/dataset-0000000000000000", json={"name": "x"}).status_code == 404
    assert worker.http.get(f"/v1/datasets/{dataset}/pictures/..%2fdataset.json").status_code == 404


def test_the_number_and_the_size_of_datasets_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MAX_DATASETS", 2)
    monkeypatch.setattr(datasets, "MAX_IMAGES", 2)
    picture = png((64, 64))
    store = DatasetStore(tmp_path, max_bytes=3 * len(picture))
    first, second = (store.create(name)["id"] for name in "ab")
    with pytest.raises(ConflictError, match="2 datasets"):
        store.create("c")
    store.put_image(first, "1", picture)
    store.put_image(first, "2", picture)
    store.put_image(first, "2", picture)  # instead of the other one
    with pytest.raises(ConflictError, match="2 images"):
        store.put_image(first, "3", picture)
    store.put_image(second, "1", picture)
    with pytest.raises(ConflictError, match="GB together"):
        store.put_image(second, "2", picture)
    store.delete_image(first, "1")
    store.put_image(second, "2", picture)
    assert DatasetStore(tmp_path, max_bytes=3 * len(picture)).summaries()[0]["pictures"] in (1, 2)
    store.delete(first)
    store.create("c")


def test_crops_are_those_of_the_trainer_and_the_check_says_what_a_run_needs(worker: Worker, dataset: str) -> None:
    """In a process of their own, whose death costs nothing."""
    plan = worker.http.post(f"/v1/datasets/{dataset}/crops", json={}).json()
    rows = {row["name"]: row for row in plan["pictures"]}
    rules = BucketRules(128, 32, 64, None, upscale=False)
    for stem in ("square", "wide one", "tall"):
        place, row = assign(SIZES[stem], rules), rows[f"{stem}.png"]
        assert row["bucket"] == str(place.bucket) and row["crop"] == list(place.crop)
        assert row["resized"] == list(place.resized) and row["cropped"] == pytest.approx(
            place.cropped_fraction, abs=1e-6
        )
    assert rows["tiny.png"]["bucket"] is None
    assert sum(plan["buckets"].values()) == 3
    larger = worker.http.post(f"/v1/datasets/{dataset}/crops", json={"settings": {"resolution": 64, "upscale": True}})
    assert {row["bucket"] for row in larger.json()["pictures"]} >= {"64x64"}

    if sized(0, 1):
        (planner,) = worker.child_pids("inweave.serve.planner.process")
        os.kill(planner, signal.SIGKILL)
    body = {"dataset": dataset, "settings": {"steps": 7, "rank": 2}}
    answer = worker.http.post("/v1/train/check", json=body)
    if answer.status_code == 400:  # the one that was killed was asked; the next one gets a new process
        answer = worker.http.post("/v1/train/check", json=body)
    report = answer.json()
    assert report["ok"] and report["estimate"]["steps"] == 7 and report["estimate"]["total_bytes"] > 0
    assert report["estimate"]["seconds"] > 0 and report["device"]["total_bytes"] > 0
    assert report["settings"]["rank"] == 2 and not {"output", "device", "dataset", "model"} & set(report["settings"])
    assert report["warnings"] == ["too small for any bucket, left out: 1: tiny.png"]
    assert str(worker.data) not in answer.text and "/" not in "".join(report["warnings"])
    if sized(0, 1):
        refused = worker.http.post("/v1/train/check", json={**body, "settings": {"vram": "1MiB"}}).json()
        assert not refused["ok"] and "vram" in refused["problems"][0]


def test_every_setting_of_a_request_has_a_limit() -> None:
    """Whatever a setting is, now or later: no number, text, list or nesting goes on without end."""
    fields = TrainSettings.model_fields
    assert {*LIMITS, *ITEMS} <= fields.keys()
    seeds = {"seed", "sample_seed"}
    for name in fields.keys() - {*RESERVED}:
        for value in (2**62, 1e300, "x" * 10**6, ["x"] * 10**5, {str(n): 1 for n in range(10**4)}, [[[[["x"]]]]]):
            problems = limit_problems({name: value})
            assert (name in seeds and value == 2**62) or problems[0].field.startswith(name), (name, value)  # type: ignore[union-attr]
        default = fields[name].get_default(call_default_factory=True)
        assert limit_problems({name: default}) == [], name
    assert limit_problems(dict.fromkeys(seeds, 2**63 - 1)) == []
    (nested,) = limit_problems({"rules": [{"pattern": "x", "rank": 4}, {"pattern": "x", "rank": 65536}]})
    assert str(nested).startswith("rules.1.rank: at most 1,024 here")
    for name, text in (("rank", "65536"), ("rank", " 6.5e4"), ("resolution", "8192x8192"), ("batch_size", "1_000_000")):
        (written,) = limit_problems({name: text})
        assert str(written).startswith(f"{name}: at most"), text  # pydantic reads such texts as numbers
    assert limit_problems({"resolution": "512x768", "batch_size": "auto", "caption": "65536", "rank": "64"}) == []
    usual = {"rank": 256, "resolution": 2048, "steps": 100_000, "sample_prompts": ["a"] * 20, "learning_rate": 1.0}
    assert limit_problems(usual) == []


def test_one_request_cannot_take_the_memory_or_the_time_of_all(worker: Worker, dataset: str) -> None:
    def ask(**settings: Any) -> httpx.Response:
        return worker.http.post("/v1/train/check", json={"dataset": dataset, "settings": {"steps": 5, **settings}})

    for settings in ({"rank": 65536}, {"network": "locon", "conv_rank": 65536}, {"caption_variants": 2**30}):
        refused = ask(**settings)
        name = next(reversed(settings))
        assert refused.status_code == 400 and refused.json()["error"]["problems"][0].startswith(f"{name}: at most")
    for path in (f"/v1/datasets/{dataset}/crops", "/v1/jobs"):
        body = {"operation": "train", "dataset": dataset, "name": "x"} if path == "/v1/jobs" else {}
        assert worker.http.post(path, json={**body, "settings": {"rank": 65536}}).status_code == 400
    assert ask(rank=4).json()["ok"]
    (planner, *_) = worker.child_pids("inweave.serve.planner.process")
    os.kill(planner, signal.SIGSTOP)  # as one that plans for long
    try:
        with ThreadPoolExecutor(2) as pool:  # either request may get the stopped planner
            ranks = {pool.submit(ask, rank=rank): rank for rank in (8, 16)}
            done, waiting = wait(ranks, timeout=60, return_when=FIRST_COMPLETED)
            assert len(done) == 1, "another process answers the other request"
            os.kill(planner, signal.SIGCONT)
            for request in (*done, *waiting):
                assert request.result().json()["settings"]["rank"] == ranks[request]
    finally:
        with suppress(ProcessLookupError):
            os.kill(planner, signal.SIGCONT)


def test_a_plan_that_takes_too_much_memory_is_refused_and_the_next_one_made() -> None:
    code = """
from inweave.errors import RequestError
from inweave.serve.planner.process import MemoryGuard, private_bytes
guard = MemoryGuard(private_bytes() + 2**26)
guard.start()
def hungry(data):
    pieces = []
    while True:
        pieces.append(bytearray(2**20))
try:
    guard.guarded(hungry)({})
except RequestError as error:
    print(error)
print(guard.guarded(lambda data: data)({"next": 1}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    refusal, following = done.stdout.splitlines()
    assert "cannot be planned here" in refusal and following == "{'next': 1}", done.stderr


def test_a_plan_that_takes_too_long_ends_alone() -> None:
    async def ask() -> str:
        client = PlannerClient(seconds=0.1, processes=1)
        try:
            await client.call("crops", {})
        except RequestError as error:
            return str(error)
        finally:
            await asyncio.gather(client.close(), client.close())
        return ""

    assert "took longer than 0.1 s" in asyncio.run(ask())


def test_plans_that_make_no_sense_are_refused(worker: Worker, dataset: str) -> None:
    empty = worker.http.post("/v1/datasets", json={}).json()["id"]
    assert worker.http.post(f"/v1/datasets/{empty}/crops", json={}).json()["pictures"] == []
    assert "no images" in worker.http.post("/v1/train/check", json={"dataset": empty}).json()["problems"][0]
    assert worker.http.post("/v1/jobs", json={"operation": "train", "dataset": empty, "name": "x"}).status_code == 400
    worker.http.put(f"/v1/datasets/{empty}/pictures/a.png", content=png((128, 128)))
    report = worker.http.post("/v1/train/check", json={"dataset": empty}).json()
    assert not report["ok"] and "caption" in report["problems"][0]
    for path, body, status in (
        ("/v1/train/check", {"dataset": "/etc"}, 404),
        ("/v1/train/check", {"dataset": dataset, "settings": {"rank": -1}}, 400),
        ("/v1/train/check", {"dataset": dataset, "settings": {"output": "/tmp/x"}}, 400),
        ("/v1/train/check", {"dataset": dataset, "settings": {"allow_download": True}}, 400),
        ("/v1/train/check", {"dataset": dataset, "settings": {"dialect": "peft"}}, 400),
        ("/v1/train/check", {"dataset": dataset, "model": "nosuch"}, 404),
        (f"/v1/datasets/{dataset}/crops", {"settings": {"sample_prompts": "x.txt"}}, 400),
        (f"/v1/datasets/{dataset}/crops", {"output": "/tmp/x"}, 400),
        ("/v1/jobs/job-0/extend", {"steps": 5}, 404),
        ("/v1/jobs/job-0/checkpoints/5", {}, 404),
    ):
        answer = worker.http.post(path, json=body)
        assert answer.status_code == status, (path, body, answer.text)
    picture = worker.ended(worker.submit(steps=1, width=64, height=64))["id"]
    assert worker.http.get(f"/v1/jobs/{picture}/checkpoints").status_code == 400


def test_what_can_be_set_is_told(worker: Worker) -> None:
    options = worker.http.get("/v1/train/options").json()
    table = {row["name"]: row for row in options["settings"]}
    assert options["base"] == "inweave/emoji" and table["rank"]["default"] == 8 and table["steps"]["default"] == 300
    assert table["network"]["schema"]["enum"] and not {"output", "device", "model"} & set(table)
    presets = {preset["name"]: preset["settings"] for preset in options["presets"]}
    assert presets["quick"]["steps"] == 75 and presets["thorough"]["rank"] == 16
    assert worker.http.get("/v1/train/options", params={"model": "nosuch"}).status_code == 404


def test_a_run_is_paused_used_resumed_and_extended(worker: Worker, dataset: str) -> None:
    def start(name: str, **settings: Any) -> str:
        body = {"operation": "train", "dataset": dataset, "name": name, "settings": TINY | settings}
        answer = worker.http.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def tensors(job: dict[str, Any]) -> dict[str, Any]:
        assert job["state"] == "done", job["error"]
        return load(worker.http.get(f"/v1/loras/{job['result']['adapter']['id']}/file").content)

    # paused as soon as there is a checkpoint; its adapter is used at once
    sampling = {"sample_every": 2, "sample_prompts": ["a square --w 64 --h 64"], "sample_steps": 1}
    job = start("paused", steps=500, save_every=2, **sampling)
    assert worker.http.delete(f"/v1/datasets/{dataset}").status_code == 409
    for event in worker.events(job):
        assert str(worker.data) not in str(event)
        if event["type"] == "checkpoint":
            worker.http.delete(f"/v1/jobs/{job}")
    assert worker.job(job)["state"] == "cancelled"
    steps = [row["step"] for row in worker.http.get(f"/v1/jobs/{job}/checkpoints").json()["checkpoints"]]
    assert steps[0] == 2
    lora = worker.http.post(f"/v1/jobs/{job}/checkpoints/2")
    assert lora.status_code == 201 and lora.json()["removable"]
    assert worker.http.post(f"/v1/jobs/{job}/checkpoints/2").json()["id"] == lora.json()["id"]
    assert worker.http.post(f"/v1/jobs/{job}/checkpoints/3").status_code in (201, 404)
    used = worker.ended(worker.submit(loras=[lora.json()["id"]], steps=1, width=64, height=64))
    assert used["result"]["loras"][0]["modules"] > 0
    again = worker.http.post(f"/v1/jobs/{job}/retry").json()["id"]
    types = []
    for event in worker.events(again):
        types.append(event["type"])
        if event["type"] == "history":
            assert event["resumed_from"] == steps[-1]
            assert [record["step"] for record in event["records"]] == list(range(1, steps[-1] + 1))
        if event["type"] == "sample":
            picture = worker.http.get(event["url"])
            assert picture.headers["content-type"] == "image/png" and "image" not in event
        if event["type"] == "progress":
            assert event["step"] > steps[-1]
            worker.http.delete(f"/v1/jobs/{again}")
    assert {"history", "sample", "checkpoint"} <= set(types)
    assert worker.job(again)["run"] == job

    # a run that was to have 500 steps ends a step after where it was paused
    done = [event["step"] for event in worker.events(again) if event["type"] in ("progress", "checkpoint")][-1]
    assert worker.http.post(f"/v1/jobs/{again}/extend", json={"steps": 0}).status_code == 400
    longer = worker.http.post(f"/v1/jobs/{again}/extend", json={"steps": done + 1})
    assert longer.status_code == 202, longer.text
    ended = worker.ended(longer.json()["id"])
    assert ended["result"]["steps"] == done + 1 and ended["run"] == job and tensors(ended)
    assert worker.http.post(f"/v1/jobs/{ended['id']}/extend", json={"steps": done + 1}).status_code == 400
    if sized(0, 1):  # two steps and two more are the same bits as four
        half = worker.ended(start("half", steps=2))
        extended = worker.http.post(f"/v1/jobs/{half['id']}/extend", json={"steps": 4}).json()["id"]
        parts, whole = tensors(worker.ended(extended)), tensors(worker.ended(start("whole", steps=4)))
        assert whole.keys() == parts.keys() and all((whole[name] == parts[name]).all() for name in whole)


def test_a_run_whose_checkpoints_are_gone_is_not_extended(tmp_path: Path) -> None:
    runs = TrainingRuns(tmp_path)
    request = {"config": {"name": "x", "steps": 5}}
    job = Job(
        "job-1", 1, "train", "m", "done", 0, "", request, 1, False, 0, 0, 0, None, {"steps": 5}, False
    )  # fmt: skip
    with pytest.raises(ConflictError, match="start_from"):
        runs.extend(job, 10)
    with pytest.raises(MissingError, match="it has none"):
        runs.checkpoint(job, 5)


def test_an_adapter_is_added_once(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    source.write_bytes(b"one")
    folder = tmp_path / "loras"
    folder.mkdir()
    first = add_to_library(source, folder, "style")
    assert add_to_library(source, folder, "style") == first
    source.write_bytes(b"two")
    second = add_to_library(source, folder, "style")
    assert second.name == "style-2.safetensors" and add_to_library(source, folder, "style") == second
    assert sorted(path.name for path in folder.iterdir()) == ["style-2.safetensors", "style.safetensors"]


def test_an_adapter_that_differs_in_its_metadata_alone_is_added_once(tmp_path: Path) -> None:
    """What a job that was killed after it had delivered delivers again."""
    source, folder = tmp_path / "source.safetensors", tmp_path / "loras"
    folder.mkdir()
    paths = []
    for number, finished in ((1, "10"), (1, "20"), (2, "20")):
        save_file({"x": np.full(3, number, dtype="f4")}, source, {"ss_training_finished_at": finished})
        paths.append(add_to_library(source, folder, "style").name)
    assert paths == ["style.safetensors", "style.safetensors", "style-2.safetensors"]
