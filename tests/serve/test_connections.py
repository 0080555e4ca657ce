"""Connections that send or read next to nothing: each ends in time, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn

from inweave.serve.http import connections, limits
from inweave.serve.http.security import Security
from inweave.serve.settings import ServeSettings
from tests.serve.worker import Worker
from tests.support import figure, sized


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body and answers with its length, or with more than a connection buffers."""
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"x" * (64 * 1024 * 1024) if scope["path"] == "/large" else str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[int, set[Any]]]:
    """The application behind the real layers: its port, and its connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        Security(application, ServeSettings(), lambda scope, status, failure: {"error": failure.as_dict()}),
        http=connections.TimedProtocol,
        log_level="error",
        lifespan="off",
    )
    running = uvicorn.Server(settings)
    with contextlib.suppress(asyncio.CancelledError):
        task = asyncio.create_task(running._serve([listener]))
        while not running.started:
            await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1]), running.server_state.connections
        running.should_exit = running.force_exit = True
        await task


async def seconds_until_cut(port: int, first: bytes, drip: bytes = b"", *, pause: float = 0.05) -> tuple[float, bytes]:
    """How long a connection lasts that sends ``first`` and then ``drip`` again and again; what it was answered."""

    def client() -> tuple[float, bytes]:
        # asyncio drops an answer if sending fails before it is read, and a server closes once it has answered
        answer = b""
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(first)
            started = time.monotonic()
            while time.monotonic() - started < 20:
                if select.select([line], [], [], pause)[0]:
                    try:
                        piece = line.recv(65536)
                    except ConnectionError:
                        break
                    if not piece:
                        break
                    answer += piece
                elif drip:
                    with contextlib.suppress(ConnectionError):
                        line.sendall(drip)
            return time.monotonic() - started, answer

    return await asyncio.to_thread(client)


HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def test_heads_and_bodies_that_do_not_arrive_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.5)

    async def all_of_them() -> tuple[tuple[float, bytes], ...]:
        async with server() as (port, _):
            return await asyncio.gather(
                seconds_until_cut(port, b""),
                seconds_until_cut(port, HEAD),
                seconds_until_cut(port, HEAD, b"X: y\r\n"),
                seconds_until_cut(port, HEAD + b"Content-Length: 2\r\n\r\nxx" + HEAD, b"X: y\r\n"),
                seconds_until_cut(port, HEAD + b"Content-Length: 9999\r\n\r\n"),
                seconds_until_cut(port, HEAD + b"Content-Length: 9999\r\n\r\n", b"x"),
            )

    silent, half, drip, second, stopped, trickle = asyncio.run(all_of_them())
    for seconds, answer in (silent, half, drip):
        assert seconds < 15 and answer == b""
    assert second[0] < 15 and second[1].endswith(b"\r\n\r\n2")  # the first request of it was answered
    for seconds, answer in (stopped, trickle):
        assert seconds < 15 and b" 408 " in answer and b"too_slow" in answer


def test_a_body_that_is_slow_but_steady_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 5.0)
    monkeypatch.setattr(limits, "BODY_RATE", 1)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)  # a head that arrived is not waited for

    async def call() -> bytes:
        async with server() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"Content-Length: 8\r\nConnection: close\r\n\r\n")
            for _ in range(8):
                await asyncio.sleep(0.1)
                writer.write(b"x")
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(call()).endswith(b"\r\n\r\n8")


def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.5)

    async def call() -> int:
        async with server() as (port, connected):
            line = socket.create_connection(("127.0.0.1", port))
            line.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            while not connected:
                await asyncio.sleep(0.01)
            deadline = time.monotonic() + 20
            while connected and time.monotonic() < deadline:
                await asyncio.sleep(0.05)

            def drain() -> int:
                total = 0
                with contextlib.suppress(ConnectionError):
                    while piece := line.recv(1 << 20):
                        total += len(piece)
                return total

            length = await asyncio.to_thread(drain)
            line.close()
            return length

    assert asyncio.run(call()) < 64 * 1024 * 1024


def test_connections_that_never_finish_do_not_keep_others_out(worker: Worker) -> None:
    """More of them than a process may have open files by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = sized(300, min(2000, hard - 200))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 200)), hard))
    port = int(worker.url.rpartition(":")[2])
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        for number, line in enumerate(lines):
            whole = b"Content-Length: 1000\r\n\r\n{" if number % 2 else b"X-"
            line.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + whole)
        started = time.monotonic()
        assert worker.http.get("/health").status_code == 200
        assert worker.ended(worker.submit(steps=1, width=64, height=64))["state"] == "done"
        figure(f"{count} connections held open: a job took {time.monotonic() - started:.2f} s")
    finally:
        for line in lines:
            line.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("chunked", [False, True])
def test_the_sender_of_a_large_body_reads_the_refusal(chunked: bool) -> None:
    """A connection that is closed on unread data is reset, and the answer is lost with it."""
    size = 65 * 2**20
    pieces = (b" " * 2**20 for _ in range(65))

    async def send() -> httpx.Response:
        async with server() as (port, _):
            headers = {} if chunked else {"Content-Length": str(size)}
            request = httpx.Request("POST", f"http://127.0.0.1:{port}/", content=pieces, headers=headers)
            return await asyncio.to_thread(lambda: httpx.Client(timeout=60).send(request))

    answer = asyncio.run(send())
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large"


def test_clients_that_hang_up_leave_no_traceback(worker: Worker) -> None:
    before, port = len(worker.log()), int(worker.url.rpartition(":")[2])
    for path in ("/v1/jobs", "/v1/uploads", "/v1/loras?name=x", "/v1/images/generations", "/sdapi/v1/txt2img"):
        with socket.create_connection(("127.0.0.1", port)) as line:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
            line.sendall(head.encode() + b'{"prompt"')
            time.sleep(0.05)
    for path in ("/v1/images/generations", "/sdapi/v1/txt2img"):
        body = b'{"prompt": "x", "steps": 50, "stream": true}'
        with socket.create_connection(("127.0.0.1", port)) as line:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            line.sendall(head.encode() + body)
            time.sleep(0.2)
    worker.until(lambda: worker.http.get("/v1/queue").json()["running"] == [])
    assert "Traceback" not in worker.log()[before:]
