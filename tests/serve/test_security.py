"""The layer around every route: token, origin, host, size, headers."""

from __future__ import annotations

import asyncio
import base64
import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, Problem
from inweave.serve.app import create_app
from inweave.serve.http.tokens import OPEN_PATHS
from inweave.serve.jobs.failures import message_of
from inweave.serve.jobs.private_paths import PrivatePaths
from inweave.serve.settings import ServeSettings
from tests.support import figure

TOKEN = "correct horse battery"
BASIC = "Basic " + base64.b64encode(f"user:{TOKEN}".encode()).decode()


def routes() -> list[tuple[str, str]]:
    application: Any = create_app(ServeSettings(token=TOKEN, data=Path("/nonexistent")))
    paths = application._app.openapi()["paths"]
    listed = [
        (method.upper(), re.sub(r"{\w+}", "job-0", path)) for path, methods in paths.items() for method in methods
    ]
    mounted = [
        (method, re.sub(r"{\w+(:path)?}", "job-0", route.path))
        for route in application._app.router.routes
        for method in sorted(getattr(route, "methods", None) or ("GET",))
        if hasattr(route, "path")
    ]
    return list(dict.fromkeys([*listed, *mounted, ("GET", "/"), ("GET", "/nosuch"), ("POST", "/nosuch")]))


async def ask(
    method: str, path: str, headers: dict[str, str], application: Any, body: bytes = b""
) -> tuple[int, dict[str, str]]:
    """(status, headers) of one request, with an application whose service was never started."""
    sent: list[dict[str, Any]] = []
    pending = [
        {"type": "http.request", "body": body[i : i + 65536], "more_body": i + 65536 < len(body)}
        for i in range(0, len(body) or 1, 65536)
    ]

    async def receive() -> dict[str, Any]:
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in {"host": "127.0.0.1:7870", **headers}.items()]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": raw,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7870),
        "root_path": "",
        "app": None,
        "state": {},
    }
    try:
        await application(scope, receive, send)  # type: ignore[arg-type]
    except AttributeError:
        return 0, {}  # the route was reached; there is no service behind it
    start = next(message for message in sent if message["type"] == "http.response.start")
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}


def test_every_route_wants_the_token_and_the_right_origin() -> None:
    application = create_app(ServeSettings(token=TOKEN, data=Path("/nonexistent")))
    listed = routes()
    assert len(listed) > 50

    async def matrix() -> list[str]:
        wrong = []
        for method, path in listed:
            for authorization, known in (
                (None, False),
                ("Bearer wrong-token", False),
                ("Basic !!", False),
                (f"Bearer {TOKEN}", True),
                (BASIC, True),
            ):
                for origin, own in (
                    (None, True),
                    ("http://127.0.0.1:7870", True),
                    ("http://evil.example", False),
                    ("null", False),
                ):
                    headers = {}
                    if authorization:
                        headers["authorization"] = authorization
                    if origin:
                        headers["origin"] = origin
                    status, _ = await ask(method, path, headers, application)
                    if not known and path not in OPEN_PATHS:
                        expected: tuple[int, ...] = (401,)
                    elif not own and method not in ("GET", "HEAD", "OPTIONS"):
                        expected = (403,)
                    else:
                        expected = ()
                    if (expected and status not in expected) or (not expected and status in (401, 403)):
                        wrong.append(f"{method} {path} {authorization} {origin}: {status}")
        return wrong

    assert asyncio.run(matrix()) == []
    figure(
        f"{len(listed)} routes x 5 kinds of token x 4 origins: {len(listed) * 20} requests, "
        "each answered as it should be"
    )


def test_answers_carry_the_headers_that_protect_pages() -> None:
    status, headers = asyncio.run(ask("GET", "/health", {}, create_app(ServeSettings(data=Path("/nonexistent")))))
    assert status == 200
    assert (
        "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
    )
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7870", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_made_to_resolve_here_is_refused(host: str) -> None:
    assert (
        asyncio.run(ask("GET", "/v1/jobs", {"host": host}, create_app(ServeSettings(data=Path("/nonexistent")))))[0]
        == 421
    )


def test_a_body_over_the_limit_is_refused_with_or_without_a_length() -> None:
    application = create_app(ServeSettings(data=Path("/nonexistent"), body_bytes=100_000))
    body = b" " * 200_000
    for headers in ({}, {"content-length": "200000"}, {"content-length": "5"}, {"content-length": "-5"}):
        assert asyncio.run(ask("POST", "/v1/queue", headers, application, body))[0] == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "worker.example"])
def test_an_open_address_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        ServeSettings(host=host)
    assert ServeSettings(host=host, token=TOKEN).token == TOKEN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LoRA /srv/loras/a/pixel.safetensors: no such file", "LoRA a/pixel.safetensors: no such file"),
        ("/srv/models/a b/unet: no weights", "a b/unet: no weights"),
        ("/srv/loras: not a folder", "loras: not a folder"),
        ("/real/loras/x: a link", "x: a link"),
        ("model inweave/emoji has 3/4 of it", "model inweave/emoji has 3/4 of it"),
        ("prompt: /v1/a/b, ~/x, C:\\\\y and 0x7f3a2b1c4d50", "prompt: /v1/a/b, ~/x, C:\\\\y and 0x7f3a2b1c4d50"),
    ],
)
def test_messages_lose_the_folders_of_the_worker_and_nothing_else(text: str, expected: str) -> None:
    assert PrivatePaths(["/srv/loras", "/srv/models", "/real/loras", "relative", "/"]).public(text) == expected


def test_messages_name_files_relative_to_the_real_folder_and_to_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    paths = PrivatePaths([tmp_path / "link"])
    assert [paths.public(f"{tmp_path / folder / 'x'}: broken") for folder in ("link", "real")] == ["x: broken"] * 2
    settings = ServeSettings(
        data=Path("/d"), model="/m/sd15", lora_folders=(Path("/l"),), dataset_folders=(Path("/s/t"),)
    )
    assert {"/d", "/l", "/m", "/s"} <= {*settings.private_folders()}


def test_what_a_client_wrote_is_repeated_unchanged() -> None:
    message = message_of(ConfigError(Problem("lora", "a/b/c: no route matches GET /v1/jobs/job-1")))
    assert message == "lora: a/b/c: no route matches GET /v1/jobs/job-1"


def test_a_token_that_is_refused_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="at least 8 characters") as caught:
        ServeSettings(token="hush-42")
    assert "hush-42" not in str(caught.value)


def test_pages_of_allowed_origins_can_read_refusals_too() -> None:
    settings = ServeSettings(
        token=TOKEN, data=Path("/nonexistent"), origins=("https://front.example",), body_bytes=1024
    )
    application = create_app(settings)
    ours, token = {"origin": "https://front.example"}, {"authorization": f"Bearer {TOKEN}"}
    for headers, body, expected in (
        (ours, b"", 401),
        (ours | token, b" " * 2000, 413),
        (ours | token | {"content-length": "2000"}, b" " * 2000, 413),
        (ours | token, b"{", 400),
    ):
        status, answer = asyncio.run(ask("POST", "/v1/images/generations", headers, application, body))
        assert status == expected and answer["access-control-allow-origin"] == "https://front.example"
        assert answer["content-security-policy"]
    assert (
        "access-control-allow-origin" not in asyncio.run(ask("POST", "/v1/queue", {"origin": "null"}, application))[1]
    )


def test_a_page_of_an_allowed_origin_may_ask_and_read() -> None:
    settings = ServeSettings(token=TOKEN, data=Path("/nonexistent"), origins=("https://front.example",))
    application = create_app(settings)
    question = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, status in (("https://front.example", 204), ("https://evil.example", 401)):
        code, headers = asyncio.run(ask("OPTIONS", "/v1/jobs", {"origin": origin, **question}, application))
        assert code == status and ("access-control-allow-origin" in headers) == (status == 204)
    code, headers = asyncio.run(ask("GET", "/health", {"origin": "https://front.example"}, application))
    assert headers["access-control-allow-origin"] == "https://front.example" and headers["vary"] == "origin"
    assert "access-control-allow-origin" not in asyncio.run(ask("GET", "/health", {"origin": "null"}, application))[1]
