"""Every route that reads a body gets values of wrong types, made from its own OpenAPI schema.

Each field in turn is given every odd value, and seeded random bodies give several at once, at any depth. Answers are
2xx or 4xx in the route's documented shape, in seconds; the log has no traceback.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inweave.training.config.fields import TrainSettings
from tests.serve.test_interface import document
from tests.serve.worker import SMALL, Worker
from tests.support import sized

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 2**64, 10**400, "", " ", "x", "0", "-1",
    "NaN", "../../etc/passwd", "/etc/passwd", "a\nb", "\u202e", "\U0001f34e", "é" * 5000, "<lora:pixel:9e999>", "((((",
    [], [None], [[]], [1, "x"], {}, {"": None}, {"name": []}, {"name": "pixel", "strength": {}}, {"x": {"y": [{}]}},
    "job-0", DEEP,
)  # fmt: skip
BROKEN = (
    b"", b"{", b"[]", b"null", b"0", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b"\x00",
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\u0000"}', b'{"prompt": NaN}', b'{"steps": 1e999}', b'{"a": 1, "a": 2}',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 10_000 + b"}", b"\xef\xbb\xbf{}",
    '{"prompt": "x"}'.encode("utf-16"),
)  # fmt: skip
#: valid bodies but for a LoRA that is looked up last: images take longer than everything that is tested here
BASE: dict[str, dict[str, Any]] = {
    "/v1/jobs": {"prompt": "x <lora:nosuch:1>", **SMALL},
    "/v1/images/generations": {"prompt": "x <lora:nosuch:1>", "size": "64x64", "steps": 1},
    "/sdapi/v1/txt2img": {"prompt": "x <lora:nosuch:1>", **SMALL},
    "/sdapi/v1/img2img": {"init_images": ["x"], "prompt": "x", **SMALL},
    "/v1/loras/check": {"lora": "pixel", "model": "inweave/emoji"},
    "/v1/loras/convert": {"lora": "pixel", "to": "peft"},
    "/v1/train/check": {"dataset": "dataset-0", "model": "inweave/emoji"},
    "/v1/queue": {"paused": False},
}


def json_routes() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return {path: (method, its fields)} of the routes that read JSON."""
    described = document()
    schemas = described["components"]["schemas"]

    def fields(schema: dict[str, Any]) -> Iterator[str]:
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        yield from schema.get("properties", ())
        for each in schema.get("anyOf", ()):
            yield from fields(each)

    return {
        path: (method, tuple(dict.fromkeys(fields(body["schema"]))))
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if (body := operation.get("requestBody", {}).get("content", {}).get("application/json"))
    }


def nested(random: random.Random, depth: int = 3) -> Any:
    """Return an odd value, or a list or an object of some."""
    kind = random.randrange(4) if depth else 0
    if kind == 2:
        return [nested(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == 3:
        names = ("name", "strength", "path", "hash", "model", "x", "")
        return {random.choice(names): nested(random, depth - 1) for _ in range(random.randrange(4))}
    return random.choice(ODD)


def ask(worker: Worker, method: str, path: str, content: bytes) -> list[str]:
    """Send a body and return what is wrong with the answer."""
    request = f"{method} {path} {content[:200]!r}"
    headers = {"Content-Type": "application/json"}
    try:
        answer = worker.http.request(method, path, content=content, headers=headers, timeout=20)
    except httpx.HTTPError as error:
        return [f"{request}: {error!r}"]
    if answer.status_code >= 500:
        return [f"{request}: {answer.status_code} {answer.text[:300]}"]
    if answer.status_code >= 400:
        body = answer.json()
        if "detail" not in body and "code" not in body["error"]:
            return [f"{request}: {answer.text[:300]}"]
    return []


@pytest.fixture(autouse=True)
def as_before(worker: Worker) -> Iterator[None]:
    """Leave the worker that other tests share as it was: odd values may pause its queue or change its options."""
    options = worker.http.get("/sdapi/v1/options").json()
    yield
    assert worker.http.post("/v1/queue", json={"paused": False}).status_code == 200
    assert worker.http.post("/sdapi/v1/options", json=options).status_code == 200
    for job in worker.http.get("/v1/jobs", params={"state": ["queued", "running"], "limit": 200}).json()["jobs"]:
        worker.http.delete(f"/v1/jobs/{job['id']}")


@pytest.mark.sample(15)
@pytest.mark.parametrize("route", json_routes())
def test_no_value_of_any_field_is_an_internal_error(worker: Worker, route: str) -> None:
    method, fields = json_routes()[route]
    path = route.format(job_id="job-0", dataset="demo", name="x.png", album="album-0", reference="pixel")
    before, base = len(worker.log()), BASE.get(route, {})
    dice = random.Random(7)
    bodies: list[Any] = [{**base, name: dice.choice(ODD)} for name in fields for _ in range(sized(2, 12))]
    bodies += [{**base, **{name: nested(dice) for name in dice.choices(fields, k=3)}} for _ in range(sized(10, 300))]
    if "prompt" in fields:  # which runs, unless the value is refused
        bodies += [
            {**base, "prompt": "x", name: value} for name, value in (("seed", -1), (fields[-1], dice.choice(ODD)))
        ]
    if route == "/v1/jobs":
        bodies += [{**body, "operation": "train"} for body in bodies]
    if "settings" in fields:  # of a training run
        names = dice.sample([*TrainSettings.model_fields], k=sized(30, 120))
        bodies += [{**base, "settings": {name: dice.choice(ODD)}} for name in names]
    wrong = [line for content in BROKEN for line in ask(worker, method, path, content)]
    for body in bodies:
        wrong += ask(worker, method, path, json.dumps(body).encode())
    assert wrong == []
    assert "Traceback" not in worker.log()[before:]
    assert worker.http.get("/ready").status_code == 200


def test_malformed_requests_and_clients_that_hang_up_leave_no_traceback(worker: Worker) -> None:
    """Requests are cut anywhere, answers are not read, connections are reset; no job is left in the end."""
    host = worker.url.removeprefix("http://")
    job, before = worker.submit(prompt="x", **SMALL), len(worker.log())

    def head(line: str, *more: str) -> bytes:
        return "\r\n".join((f"{line} HTTP/1.1", f"Host: {host}", *more, "", "")).encode("latin-1")

    def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
        return head(f"POST {path}", f"Content-Type: {kind}", f"Content-Length: {len(body)}") + body

    image = json.dumps({"prompt": "x", "size": "64x64", "steps": 20, "stream": True, "partial_images": 2}).encode()
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + b"z" * 90_000
    chunked = "Transfer-Encoding: chunked"
    requests = (
        post("/sdapi/v1/txt2img", json.dumps({"prompt": "x", **SMALL, "steps": 20}).encode()),
        post("/v1/images/generations", image), post("/v1/images/edits", form, "multipart/form-data; boundary=x"),
        post("/v1/loras?name=q", b"x" * 200_000, "application/octet-stream"), head(f"GET /v1/jobs/{job}/events"),
        head("GET /v1/loras"), head("GET /openapi.json"), head("POST /v1/jobs", chunked) + b"zz\r\n",
        head("POST /v1/jobs", chunked) + b"5\r\n{}   \r\nzz\r\n", head("DELETE /nosuch", chunked) + b"zz\r\n",
        head("POST /v1/jobs", chunked, "Content-Length: 5") + b"5\r\n{}   \r\n",
        head("POST /v1/jobs", "Content-Length: -1"),
        head("GET /v1/jobs/\xff\xfe"), head("GET /v1/jobs?state=\x80"), head("OPTIONS *"), head("CONNECT x:1"),
        b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"a" * 70_000,
    )  # fmt: skip
    dice = random.Random(11)
    for request in requests * sized(3, 20):
        with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=2) as client:
            with contextlib.suppress(OSError):
                client.sendall(
                    request[: dice.choice((len(request), len(request), dice.randrange(1, len(request) + 1)))]
                )
                time.sleep(dice.choice((0, 0.02)))
                if dice.random() < 0.4:
                    client.recv(dice.choice((1, 5000)))
            if dice.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
    query = {"state": ["queued", "running"]}
    worker.until(lambda: not worker.http.get("/v1/jobs", params=query).json()["jobs"], 60)
    assert "Traceback" not in worker.log()[before:], worker.log()[before:]
