"""Adapters on the Hugging Face hub: from its cache, and from a server that speaks its protocol."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from inweave import load
from inweave.errors import ConfigError, FormatError, RequestError
from tests.support import random, write

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")  # parts of it are imported when they are used
pytest.importorskip("huggingface_hub.hf_api")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def files(folder: Path) -> dict[str, bytes]:
    pair = {"lora_A.weight": random(1, 2, 8), "lora_B.weight": random(2, 8, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q"]}
    path = write(folder / "x.safetensors", {f"base_model.model.q.{key}": value for key, value in pair.items()})
    data = path.read_bytes()
    return {"adapter_model.safetensors": data, "adapter_config.json": json.dumps(config).encode(), "README.md": b"#"}


REPOSITORIES = {
    "one/peft": "",
    "one/file": "style.safetensors",
    "one/two": "a.safetensors b.safetensors",
    "one/none": "-",
}


def content(repo: str, folder: Path) -> dict[str, bytes]:
    own, names = files(folder), REPOSITORIES[repo].split()
    if names == ["-"]:
        return {"README.md": b"#"}
    inside = {f"sub/{name}": data for name, data in own.items()}
    return dict.fromkeys(names, own["adapter_model.safetensors"]) | inside if names else own


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(folder))
    for repo in REPOSITORIES:
        own = folder / f"models--{repo.replace('/', '--')}"
        for name, data in content(repo, tmp_path).items():
            path = own / "snapshots" / COMMIT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (own / "refs").mkdir()
        (own / "refs" / "main").write_text(COMMIT)
    return folder


@pytest.mark.parametrize(
    "name", ["one/peft", "one/file", "one/file/style.safetensors", "one/two/b.safetensors", "one/two/sub"]
)
def test_an_adapter_in_the_cache(name: str, cache: Path) -> None:
    adapter = load(name)
    assert [entry.ref.name for entry in adapter] == ["q"]
    assert adapter.entries[0].factors.alpha == (6 if name in ("one/peft", "one/two/sub") else None)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("one/two", ConfigError, "one/two has 2 adapter files; name one: one/two/a.safetensors, one/two/b.safetensors"),
        ("one/two/c.safetensors", ConfigError, "no adapter file at c.safetensors"),
        ("one/none", ConfigError, "one/none has no adapter file"),
        ("some/other", FormatError, "no such file or directory, and the hub's cache.*allow_download=True"),
        ("some.safetensors", FormatError, "no such file or directory$"),
        ("styles/some.safetensors", FormatError, "no such file or directory$"),
        ("./one/peft", FormatError, "no such file or directory$"),
    ],
)
def test_what_is_not_there_is_said(name: str, error: type[Exception], message: str, cache: Path) -> None:
    with pytest.raises(error, match=message):
        load(name)


def test_a_local_folder_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one" / "peft").mkdir(parents=True)
    write(
        tmp_path / "one" / "peft" / "a.safetensors",
        {"k.lora_A.weight": random(1, 2, 8), "k.lora_B.weight": random(2, 8, 2)},
    )
    monkeypatch.chdir(tmp_path)
    assert [entry.ref.name for entry in load("one/peft")] == ["k"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    contents, paths = {repo: content(repo, tmp_path) for repo in REPOSITORIES}, list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            path = self.path.partition("?")[0].strip("/")
            if path.startswith("api/models/"):
                parts = path.split("/")
                return self.answer(self.describe("/".join(parts[2:4]), parts[4:]))
            repo, _, name = path.partition("/resolve/")
            return self.answer(contents.get(repo, {}).get(name.partition("/")[2]))

        do_HEAD = do_GET

        def describe(self, repo: str, rest: list[str]) -> bytes | None:
            if repo not in contents:
                return None
            tree = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in contents[repo].items()]
            names = [{"rfilename": name} for name in contents[repo]]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": names, "private": False, "tags": []}
            return json.dumps(tree if rest[:1] == ["tree"] else info).encode()

        def answer(self, data: bytes | None) -> None:
            self.send_response(200 if data is not None else 404)
            data = data if data is not None else b"{}"
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=listener.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listener.server_port}"
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(hub.hf_api.api, "endpoint", address)
    monkeypatch.setattr(
        hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield paths
    listener.shutdown()
    listener.server_close()


def test_a_download_fetches_the_adapter_alone(server: list[str]) -> None:
    adapter = load("one/peft", allow_download=True)
    assert adapter.entries[0].factors.alpha == 6
    assert not [path for path in server if "README" in path]
    server.clear()
    assert load("one/peft").entries[0].factors.alpha == 6
    assert not server
    assert load("one/two/b.safetensors", allow_download=True).entries[0].factors.alpha is None
    assert not [path for path in server if path.endswith("a.safetensors")]


def test_a_refusal_of_the_hub_is_ours(server: list[str]) -> None:
    with pytest.raises(RequestError, match="some/other: the hub could not be reached, or refused"):
        load("some/other", allow_download=True)


def test_a_hub_that_cannot_be_reached_is_our_error(server: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setattr(hub.hf_api.api, "endpoint", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # before each of the library's attempts
    with pytest.raises(RequestError, match=r"some/other: the hub could not be reached, or refused: .*refused"):
        load("some/other", allow_download=True)
