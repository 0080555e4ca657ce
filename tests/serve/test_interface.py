"""The OpenAPI document and the figures for Prometheus say what the worker does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inweave.serve.api.native.metrics import device_memory
from inweave.serve.app import create_app
from inweave.serve.engine.contract import DeviceMemory
from inweave.serve.jobs.image_request import ImageRequest
from inweave.serve.service import DeviceState
from inweave.serve.settings import ServeSettings
from tests.serve.worker import Worker

DATA = Path(__file__).parents[1] / "data"


def document() -> dict[str, Any]:
    application: Any = create_app(ServeSettings(data=Path("/nonexistent")))
    described: dict[str, Any] = application._app.openapi()
    return described


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere_and_every_schema_is_valid() -> None:
    described = document()
    names = {name.rpartition("/")[2] for name in references(described)}
    assert names <= described["components"]["schemas"].keys()
    for schema in described["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"components": described["components"], **schema})


def test_every_operation_says_what_it_reads_and_how_it_refuses() -> None:
    silent = ("retry", "refresh", "interrupt", "skip", "session", "checkpoints")  # they read no body
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            for status in ("4XX", "503", "507"):
                assert operation["responses"][status]["content"]["application/json"]["schema"], path
            if method in ("post", "put", "patch") and not any(word in path for word in silent):
                assert operation["requestBody"]["content"], path


def test_operations_document_full_queues_and_refused_bodies() -> None:
    operations = {
        f"{method} {path}": operation
        for path, each in document()["paths"].items()
        for method, operation in each.items()
    }
    busy = {route for route, operation in operations.items() if "429" in operation["responses"]}
    images = {f"post /v1/images/{name}" for name in ("generations", "edits")}
    images |= {f"post /sdapi/v1/{name}" for name in ("txt2img", "img2img", "extra-single-image", "extra-batch-images")}
    training = {"post /v1/train/check", "post /v1/datasets/{dataset}/crops", "post /v1/jobs/{job_id}/extend"}
    training.add("post /v1/datasets/{dataset}/pictures/{name}/caption")
    assert busy == images | training | {"post /v1/jobs", "post /v1/jobs/{job_id}/retry"}
    for route, operation in operations.items():
        answers = operation["responses"]
        assert answers.keys() >= {"408", "413"} or "requestBody" not in operation, route
        for status in answers.keys() & {"408", "413", "429"}:
            assert answers[status]["content"] == answers["4XX"]["content"], route


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/sdapi/v1/txt2img", "SdError"), ("/sdapi/v1/nosuch", "SdError"), ("/internal/nosuch", "SdError"),
        ("/v1/images/generations", "OpenAIError"), ("/v1/images/nosuch/x", "OpenAIError"), ("/v1/jobs", "Error"),
        ("/v1/jobs/a/nosuch", "Error"), ("/v1/nosuch", "Error"), ("/nosuch", "Error"),
    ],
)  # fmt: skip
def test_every_refusal_has_the_shape_of_its_api(path: str, shape: str) -> None:
    """Of a route, of a path without one, and of what is refused before any route: the token, the size."""
    application = create_app(ServeSettings(data=Path("/nonexistent"), token="long enough", body_bytes=1024))
    described = document()
    schema = {"components": described["components"], "$ref": f"#/components/schemas/{shape}"}
    token = {"Authorization": "Bearer long enough"}

    async def story() -> None:
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7870") as client:
            for status, answer in (
                ((401,), await client.delete(path)),
                ((404, 405), await client.delete(path, headers=token)),
                ((413,), await client.post(path, headers=token, content=b" " * 2000)),
            ):
                assert answer.status_code in status
                jsonschema_rs.validate(schema, answer.json())

    asyncio.run(story())


def fields_of(schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """Return the fields of a body: of a model, or of any of several."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return set(schema.get("properties", ())).union(*(fields_of(each, schemas) for each in schema.get("anyOf", ())))


def test_everything_that_was_documented_once_still_is() -> None:
    """Compare with the document of the version that listed bodies and answers by hand."""
    described = document()
    earlier: dict[str, Any] = json.loads((DATA / "serve" / "openapi.json").read_text())
    for route, expected in earlier.items():
        method, path = route.split()
        operation = described["paths"][path][method.lower()]
        parameters = {f"{each['in']} {each['name']}" for each in operation.get("parameters", ())}
        assert parameters >= {*expected["parameters"]}, route
        bodies = operation.get("requestBody", {}).get("content", {})
        for media, fields in expected["body"].items():
            assert fields_of(bodies[media]["schema"], described["components"]["schemas"]) >= {*fields}, route
        for status, types in expected["responses"].items():
            assert operation["responses"][status].get("content", {}).keys() >= {*types}, route


def test_examples_are_valid_and_jobs_are_flat() -> None:
    described = document()
    for operations in described["paths"].values():
        for operation in operations.values():
            for media in operation.get("requestBody", {}).get("content", {}).values():
                if "example" in media:
                    schema = {"components": described["components"], **media["schema"]}
                    jsonschema_rs.validate(schema, media["example"])
    job = described["components"]["schemas"]["ImageJob"]
    assert {"prompt", "loras", "steps", "image", "on_mismatch", "preview_every"} <= job["properties"].keys()
    assert not {"settings", "init", "mask"} & job["properties"].keys()
    example = described["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert ImageRequest.parse(example).settings.loras[0].name == "pixel"


def test_the_document_is_served_and_metrics_follow_the_conventions(worker: Worker) -> None:
    assert worker.http.get("/openapi.json").json()["components"]["schemas"]["ImageJob"]
    answer = worker.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    by_name = {family.name: family for family in families}
    assert {"inweave_jobs", "inweave_ready", "inweave_jobs_finished"} <= by_name.keys()
    for family in families:
        assert family.documentation and family.name.startswith("inweave_"), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


def test_metrics_have_the_memory_of_devices_that_have_their_own(worker: Worker) -> None:
    states = [
        DeviceState(None, "ready", False, 0, 0, 0.0),
        DeviceState("cuda:1", "ready", False, 0, 0, 0.0),
    ]
    assert list(device_memory(states)) == [] and "inweave_device_memory" not in worker.http.get("/metrics").text
    states[1] = replace(states[1], memory=DeviceMemory(allocated=1, reserved=2, total=3))
    samples = [sample for family in device_memory(states) for sample in family.samples]
    names = [f"inweave_device_memory_{name}_bytes" for name in ("allocated", "reserved", "total")]
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        (name, {"device": "1"}, number) for number, name in enumerate(names, 1)
    ]


def test_metrics_have_times_of_jobs_memory_and_requests(worker: Worker) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(worker.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    jobs = {"operation": "image_generation", "state": "done"}
    before = value("inweave_job_run_seconds_count", **jobs), value("inweave_job_wait_seconds_count")
    job = worker.ended(worker.submit(steps=1, width=64, height=64))
    assert value("inweave_job_run_seconds_count", **jobs) == before[0] + 1
    assert value("inweave_job_wait_seconds_count") == before[1] + 1
    assert value("inweave_job_run_seconds_sum", **jobs) >= job["finished"] - job["started"] > 0
    assert value("inweave_job_run_seconds_bucket", le="+Inf", **jobs) == before[0] + 1
    worker.http.get("/v1/jobs/nosuch")
    worker.http.get("/made/up/path")
    assert value("inweave_http_requests_total", route="/v1/jobs/{job_id}", method="GET", status="404") >= 1
    assert value("inweave_http_requests_total", route="unknown", status="404") >= 1
    text = worker.http.get("/metrics").text
    assert "nosuch" not in text and "made/up" not in text, "a client cannot make up series"
    for process in ("web", "model"):
        assert 2**24 < value("inweave_process_memory_bytes", process=process) < 2**34
