"""Run the web process: bind first, load in the background, drain on SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from typing import Any

import uvicorn

from inweave.errors import ConfigError, InweaveError
from inweave.serve.app import create_app
from inweave.serve.http.connections import TimedProtocol, allow_many_connections
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings

# connections that wait while the application is being built: clients may connect once the address is printed
_BACKLOG = 2048


def run(settings: ServeSettings, identity: dict[str, Any] | None = None, announce: Any = print) -> None:
    """Serve until a signal; raise ConfigError if the address is taken or the data folder cannot be used."""
    _log_to_standard_error(settings.log_level)
    allow_many_connections()
    listener = _bind(settings.host, settings.port)
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    settings = settings.model_copy(update={"port": port})
    app = create_app(settings, {"port": port, **(identity or {})}, Service.open(settings))
    config = uvicorn.Config(
        app, http=TimedProtocol, log_config=None, access_log=False, server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_seconds) + 5, h11_max_incomplete_event_size=64 * 1024,
        lifespan="on", proxy_headers=False,  # `http.forwarded` reads them, if it may
    )  # fmt: skip
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:
        server.should_exit = True

    # a signal stops the server before it has its own handlers too; one that it repeats after draining is not a failure
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    announce(f"http://{host}:{port}")
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if not server.started:
        raise InweaveError("the worker could not start; the message above says why")


def _log_to_standard_error(level: str) -> None:
    """Write the worker's messages from ``level`` on, those of libraries from warnings on."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=max(logging.WARNING, logging.getLevelName(level.upper())), format=form)
    logging.getLogger("inweave").setLevel(level.upper())
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every form that a client gets wrong


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only for IPPROTO_TCP sockets: else each answer waits 40 ms for an ACK
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from None
    return listener
