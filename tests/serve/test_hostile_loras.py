"""Names and files of strangers: nothing outside of the library is opened, and no answer breaks on what they hold."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inweave.formats.files import write_file
from inweave.models import embedded
from inweave.serve.app import create_app
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from tests.opened_files import opened_files
from tests.serve.worker import Worker
from tests.support import figure, lora_pair, sized

TRAVERSALS = [
    f"{prefix}{middle}{target}"
    for prefix in ("", "/", "./", "~/", "~root/", "file:", "C:\\", "\\\\server\\share\\")
    for middle in ("", "../", "..\\", "....//", "%2e%2e%2f", "..%2f", "..%c0%af", "styles/../../")
    for target in ("etc/passwd", "secret.safetensors", "jobs.sqlite3", "out", "mine.safetensors\x00.png", "$HOME",
        "CON", "pix\nel",
                   "\u202egnp.lexip", "<img src=x onerror=alert(1)>")
]  # fmt: skip
TEXTS = ["<img src=x onerror=alert(1)>", "'\"><script>alert(1)</script>", "\x1b[31mred\x07", "a\nb\r\n\tc",
    "\u202egnp.exe", "\u0000nul",
         "\ufeff\u200b", "x" * 100_000, "{{7*7}}${7*7}%s%n", "'; DROP TABLE files; --", "../../etc/passwd",
         "\U0001f600" * 50, "é", "e\u0301",
         " . ", "CON", "con.", "__class__.__base__", "=cmd|' /C calc'!A0"]  # fmt: skip
#: more of them, at full size
MORE_TEXTS = ["\u2066isolate\u2069", "\u200d\u200c\u2060joiners", "\u3164\u115f\u2800fillers",
    "tag\U000e0041\U000e0101", "a\u0300" * 40, "\x9b31m\x85next", "\x7f\x08\x08rubout",
              "<svg/onload=alert(1)>", "javascript:alert(1)", "&lt;b&gt;&#x41;", "</script><!--", "]]>",
              "<lora:pixel:1>", "(pixel:1.5), [a|b]", "{a|b}__wild__", "%_!%_", "\" OR 1=1 --", "\\u0000\\ud800",
              "\\..\\..\\boot.ini", "file:///etc/passwd", "..%2f..%2fetc", "~root", "$(id)`id`|id;id", "-rf", "--help",
              "lora-0123456789abcdef", "sha256:" + "0" * 64, "8845bf35ff", "NUL", "aux.h", "a" * 300, "\u212b\u2126",
              "\ufb01\u00df\u0130", "\U0001f468\u200d\U0001f469", "{\"a\": [1]}", "null", "NaN", "1e999",
              "\ufffe\uffff", "a.safetensors.safetensors", "mine.preview", "name\u00a0with\u2003spaces"]  # fmt: skip


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """The parts of a worker without a model process; a library with links and neighbors that lead out of it."""
    library, outside = tmp_path / "library", tmp_path / "outside"
    library.mkdir()
    outside.mkdir()
    write_file(library / "mine.safetensors", lora_pair("lora_unet_x", 8, 8))
    write_file(outside / "secret.safetensors", lora_pair("lora_unet_secret", 8, 8))
    write_file(tmp_path / "secret.safetensors", lora_pair("lora_unet_secret", 8, 8))
    (library / "out.safetensors").symlink_to(outside / "secret.safetensors")
    (library / "folder").symlink_to(outside, target_is_directory=True)
    (library / "loop").symlink_to(library, target_is_directory=True)
    (library / "mine.preview.png").symlink_to(outside / "secret.safetensors")
    (library / "mine.json").symlink_to(outside / "secret.json")
    os.mkfifo(library / "pipe.safetensors")
    (library / "directory.safetensors").mkdir()
    opened = Service.open(ServeSettings(data=tmp_path / "data", lora_folders=(library,)))
    yield opened
    opened.library.close()
    opened.store.close()


def client_of(service: Service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(service.settings, service=service))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7870", timeout=60)


def is_own(path: str, service: Service) -> bool:
    """What a worker may open: its data, its library, and the code it runs."""
    own = (
        service.settings.data,
        *service.library.folders,
        Path(sys.prefix),
        Path(sys.base_prefix),
        embedded.folder().parents[2],
    )
    whole = os.path.realpath(path)
    return not path or any(whole == str(folder.resolve()) or whole.startswith(f"{folder.resolve()}/") for folder in own)


def test_no_reference_opens_anything_outside_the_library(service: Service, tmp_path: Path) -> None:
    references = [
        *TRAVERSALS,
        str(tmp_path / "outside" / "secret"),
        str(tmp_path / "secret.safetensors"),
        "folder/secret",
        "loop/../secret",
    ]
    assert len(references) > 300

    async def ask_all() -> set[int]:
        statuses = set()
        async with client_of(service) as client:
            for number, reference in enumerate(references):
                quoted = urllib.parse.quote(reference, safe="")
                answers = [await client.get(f"/v1/loras/{quoted}{('', '/preview', '/file')[number % 3]}")]
                if number % 10 == 0:
                    answers += [
                        await client.delete(f"/v1/loras/{quoted}"),
                        await client.post("/v1/loras/check", json={"lora": reference}),
                        await client.post("/v1/jobs", json={"prompt": "x", "loras": [{"path": reference}]}),
                        await client.post("/v1/jobs", json={"prompt": "x", "loras": [reference]}),
                        await client.post("/v1/jobs", json={"prompt": f"x <lora:{reference}:1>"}),
                        await client.post("/sdapi/v1/txt2img", json={"prompt": f"x <lora:{reference}:1>", "steps": 0}),
                    ]
                for answer in answers:
                    statuses.add(answer.status_code)
                    assert answer.status_code in (400, 404, 405, 409), (
                        reference,
                        answer.status_code,
                        answer.text[:200],
                    )
                    assert "root:" not in answer.text
        return statuses

    with opened_files() as opened:
        service.library.scan()
        statuses = asyncio.run(ask_all())
    outside = sorted({path for path in opened if not is_own(path, service)} - {"/dev/null", os.devnull})
    assert [path for path in outside if not path.startswith(("/proc/", "/sys/", "/etc/ssl"))] == []
    assert any(path.endswith("mine.safetensors") for path in opened), "the hook sees what is opened"
    figure(
        f"{len(references)} hostile references: {sorted(statuses)}; {len(set(opened))} paths opened, "
        "none outside of the library"
    )


def test_names_and_metadata_of_strangers_never_break_an_answer(service: Service) -> None:
    """Files that are called or described like an attack are listed like any other."""
    folder = service.library.folders[0]
    wrapped = [
        f"{before}{text}{after}"
        for text in (*TEXTS, *MORE_TEXTS[: sized(8, len(MORE_TEXTS))])
        for before, after in (("", ""), ("a", ""), ("", "z"), ("<b>", "</b>"))[: sized(2, 4)]
    ]
    names = {
        name for text in wrapped if (name := re.sub(r"[/\0]", "_", text)[:50]).strip() and not name.startswith(".")
    }
    for number, name in enumerate(sorted(names)):
        write_file(folder / f"{name}.safetensors", lora_pair("lora_unet_x", 8, 8, seed=10 + number))
    described = 0
    for number, text in enumerate(wrapped):
        keys = (
            "ss_output_name",
            "modelspec.title",
            "modelspec.description",
            "modelspec.trigger_phrase",
            text[:200] or "k",
        )
        tags = {"ss_tag_frequency": json.dumps({text: {text: 3}}), "ss_dataset_dirs": json.dumps({f"10_{text}": {}})}
        write_file(
            folder / f"described-{number}.safetensors",
            lora_pair("lora_unet_x", 8, 8, seed=10_000 + number),
            {**dict.fromkeys(keys, text), **tags},
        )
        (folder / f"described-{number}.json").write_text(
            json.dumps({"activation text": text, "notes": text, "description": text})
        )
        described += 1
    report = service.library.scan()
    assert report.files == len(names) + described + 3, "also those of the package"
    assert len(names) + described >= sized(80, 300)
    service.library.examine()
    entries = service.library.entries()
    assert len({entry.contents.sha256 for entry in entries if entry.contents}) == len(entries), (
        "each is a file of its own"
    )

    async def ask_all() -> None:
        async with client_of(service) as client:
            for path in ("/v1/loras", "/sdapi/v1/loras", "/v1/models"):
                answer = await client.get(path)
                assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", path
                assert len(answer.content) < 100 * 1024 * 1024
            entries = (await client.get("/v1/loras", params={"limit": 10_000})).json()["loras"]
            assert {entry["name"] for entry in entries} >= names
            for entry in entries:
                answer = await client.get(f"/v1/loras/{entry['id']}")
                assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
                assert len(answer.content) < 200_000
            for name in names:
                answer = await client.get(f"/v1/loras/{urllib.parse.quote(name, safe='')}")
                lines = len(name.splitlines()) > 1  # no address has a line break in it; its id names such a file
                assert answer.status_code in ((404, 200) if lines else (200, 409)), (
                    name,
                    answer.text[:200],
                )  # 409: an alias too
            for text in (*TEXTS, *MORE_TEXTS):
                assert (await client.get("/v1/loras", params={"query": text[:200]})).status_code == 200

    with opened_files() as opened:
        asyncio.run(ask_all())
    assert [path for path in opened if "secret" in os.path.realpath(path)] == []
    figure(
        f"{len(names)} hostile file names and {described} files with hostile metadata and sidecars: "
        "all listed, no answer of 500"
    )


@pytest.mark.full
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_process_of_a_worker_opens_what_a_reference_names(tmp_path: Path) -> None:
    """The same with the system calls of all its processes, also those that check and apply LoRAs."""
    trace = tmp_path / "trace"
    (tmp_path / "canary-secret.safetensors").write_bytes(embedded.loras()["pixel"].read_bytes())
    tracer = ("strace", "-D", "-f", "-qq", "-e", "trace=open,openat,openat2", "-o", str(trace))
    worker = Worker(tmp_path / "data", under=tracer).start()
    try:
        targets = [f"{prefix}canary-secret{ending}" for prefix in ("", "../", "../../", f"{tmp_path}/", "..\\",
                "%2e%2e%2f", "styles/../../")
                   for ending in ("", ".safetensors")]  # fmt: skip
        for reference in targets:
            for body in ({"loras": [{"path": reference}]}, {"loras": [reference]}):
                assert worker.http.post("/v1/jobs", json={"prompt": "x"} | body).status_code in (400, 404)
            assert worker.http.get(f"/v1/loras/{urllib.parse.quote(reference, safe='')}/file").status_code == 404
        assert worker.ended(worker.submit(loras=["pixel"], steps=1))["state"] == "done"
    finally:
        worker.stop()
    calls = trace.read_text(errors="replace")
    assert "pixel.safetensors" in calls and "canary-secret" not in calls
    figure(
        f"{calls.count('open')} calls of open by all processes of a worker: "
        f"none of what {len(targets)} references named"
    )
