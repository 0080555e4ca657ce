"""A worker behind a proxy: the examples of nginx and Caddy with real ones, and headers that anybody may write."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from inweave.errors import ConfigError
from inweave.serve.http.forwarded import as_forwarded
from inweave.serve.settings import ServeSettings
from tests.serve.worker import Worker

EXAMPLES = Path(__file__).parents[2] / "deploy"
TOKEN = "correct horse battery"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def certificate(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip


def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


def nginx_command(folder: Path, port: int, worker: int) -> list[str]:
    certificate(folder)
    text = (EXAMPLES / "nginx.conf").read_text()
    text = re.sub(r"listen 443", f"listen 127.0.0.1:{port}", text).replace("127.0.0.1:7870", f"127.0.0.1:{worker}")
    text = re.sub(r"ssl_certificate \S+;", f"ssl_certificate {folder}/cert.pem;", text)
    text = re.sub(r"ssl_certificate_key \S+;", f"ssl_certificate_key {folder}/key.pem;", text)
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {paths}\n{text} }}"
    )
    return ["nginx", "-c", f"{folder}/nginx.conf", "-p", str(folder)]


def caddy_command(folder: Path, port: int, worker: int) -> list[str]:
    certificate(folder)
    text = (EXAMPLES / "Caddyfile").read_text().replace("127.0.0.1:7870", f"127.0.0.1:{worker}")
    text = text.replace(
        "images.example.com {", f"https://localhost:{port} {{\n\ttls {folder}/cert.pem {folder}/key.pem\n"
    )
    (folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    return ["caddy", "run", "--config", f"{folder}/Caddyfile", "--adapter", "caddyfile"]


@pytest.fixture(scope="module")
def shielded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that needs a token and obeys its proxy."""
    running = Worker(tmp_path_factory.mktemp("shielded") / "data", "--behind-proxy", token=TOKEN).start()
    yield running
    running.stop()


@contextlib.contextmanager
def proxied(kind: str, worker: Worker, folder: Path) -> Iterator[httpx.Client]:
    """A client of the proxy of an example; skips the test where that proxy is not installed."""
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed")
    port, command = free_port(), {"nginx": nginx_command, "caddy": caddy_command}[kind]
    arguments = command(folder, port, int(worker.url.rpartition(":")[2]))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env={"PATH": "/usr/sbin:/usr/bin:/bin",
                                                                           "HOME": str(folder)})  # fmt: skip
    try:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trust(folder), timeout=60) as client:
            deadline = time.monotonic() + 20
            while True:
                try:
                    client.get("/health")
                    break
                except httpx.TransportError:
                    assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("kind", ["nginx", "caddy"])
def test_a_worker_behind_the_proxy_of_an_example(kind: str, shielded: Worker, tmp_path: Path) -> None:
    with proxied(kind, shielded, tmp_path) as browser:
        here, token = str(browser.base_url).rstrip("/"), {"Authorization": f"Bearer {TOKEN}"}
        assert browser.get("/v1/jobs").status_code == 401
        page = browser.get("/")
        assert page.status_code == 200 and "content-security-policy" in page.headers
        session = browser.post("/v1/session", headers={**token, "Origin": here})
        assert session.status_code == 200 and "secure" in session.headers["set-cookie"].lower()
        body = {"prompt": "x", "steps": 3, "width": 64, "height": 64, "preview_every": 1}
        elsewhere = browser.post("/v1/jobs", json=body, headers={"Origin": "https://evil.example"})
        assert elsewhere.status_code == 403
        job = browser.post("/v1/jobs", json=body, headers={"Origin": here})  # with the cookie
        assert job.status_code == 202, job.text
        with browser.stream("GET", job.json()["urls"]["events"]) as events:
            kinds = [line.removeprefix("event:").strip() for line in events.iter_lines() if line.startswith("event:")]
        assert kinds[0] == "queued" and kinds.count("preview") == 2 and kinds[-1] == "done"
        client = openai.OpenAI(
            base_url=f"{here}/v1", api_key=TOKEN, http_client=openai.DefaultHttpxClient(verify=trust(tmp_path))
        )
        answer = client.images.generate(
            prompt="x", size="64x64", response_format="url", extra_body={"steps": 1}  # type: ignore[call-overload]
        )  # fmt: skip
        assert answer.data[0].url.startswith(f"{here}/v1/jobs/")
        assert browser.get(str(answer.data[0].url)).headers["content-type"] == "image/png"
        large = browser.post("/v1/uploads", content=b" " * (3 * 2**20), headers=token)
        assert large.status_code == 400, "no limit of the proxy below the worker's"


def scope(peer: str, **headers: str) -> dict[str, object]:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "scheme": "http", "client": (peer, 1), "headers": [(b"host", b"127.0.0.1:7870"), *raw]}


BEHIND = ServeSettings(behind_proxy=True, token=TOKEN)


@pytest.mark.parametrize(
    ("settings", "peer", "headers", "expected"),
    [
        (BEHIND, "127.0.0.1", {"x_forwarded_for": "6.6.6.6, 9.9.9.9"}, ("9.9.9.9", "http", "127.0.0.1:7870")),
        (BEHIND, "::1", {"x_forwarded_for": "9.9.9.9, 127.0.0.1"}, ("9.9.9.9", "http", "127.0.0.1:7870")),
        (BEHIND, "::ffff:127.0.0.1", {"x_forwarded_proto": "https"}, ("::ffff:127.0.0.1", "https", "127.0.0.1:7870")),
        (BEHIND, "127.0.0.1", {"x_forwarded_host": "evil.example, a.example"}, ("127.0.0.1", "http", "a.example")),
        (BEHIND, "127.0.0.1", {"x_forwarded_host": "a b\r\n", "x_forwarded_proto": "gopher"},
         ("127.0.0.1", "http", "127.0.0.1:7870")),
        (BEHIND, "127.0.0.1", {"x_forwarded_for": "[2001:db8::1]:99"}, ("2001:db8::1", "http", "127.0.0.1:7870")),
        (BEHIND, "8.8.8.8", {"x_forwarded_for": "9.9.9.9", "x_forwarded_host": "a", "x_forwarded_proto": "https"},
         ("8.8.8.8", "http", "127.0.0.1:7870")),
        (ServeSettings(), "127.0.0.1", {"x_forwarded_for": "9.9.9.9", "x_forwarded_proto": "https"},
         ("127.0.0.1", "http", "127.0.0.1:7870")),
        (ServeSettings(behind_proxy=True, token=TOKEN, proxies=("10.0.0.0/8",)), "10.1.2.3",
         {"x_forwarded_for": "9.9.9.9", "x_forwarded_host": "b.example:8443"}, ("9.9.9.9", "http", "b.example:8443")),
    ],
)  # fmt: skip
def test_only_a_trusted_proxy_says_who_calls_and_how(
    settings: ServeSettings, peer: str, headers: dict[str, str], expected: tuple[str, str, str]
) -> None:
    result = as_forwarded(settings, scope(peer, **headers))
    host = dict(result["headers"])[b"host"].decode()
    assert (result["client"][0], result["scheme"], host) == expected


def test_a_worker_behind_a_proxy_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="through its proxy"):
        ServeSettings(behind_proxy=True)
    with pytest.raises(ConfigError, match="proxies"):
        ServeSettings(behind_proxy=True, token=TOKEN, proxies=("not an address",))
