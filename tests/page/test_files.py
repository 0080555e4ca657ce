"""The files of the page: how they are served, what they may hold, how large they are, how they import each other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import httpx
import pytest

from inweave.serve.app import create_app
from inweave.serve.http.page_files import Page, PageFiles
from inweave.serve.settings import ServeSettings

PAGE = Page().folder
BUDGET = 430_000
#: what a first visit to Generate loads
FIRST = 162_000
#: the same two as they are sent to a browser, compressed
SENT, SENT_FIRST = 165_000, 70_000
TOKEN = "correct horse battery"


def client(settings: ServeSettings) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(settings)), base_url="http://127.0.0.1:7870", follow_redirects=True
    )


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    return ServeSettings(data=tmp_path / "none", token=TOKEN)


async def _visit(settings: ServeSettings) -> None:
    async with client(settings) as browser:
        index = await browser.get("/")
        assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
        assert index.headers["cache-control"] == "no-cache"
        again = await browser.get("/", headers={"If-None-Match": index.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
        addresses = re.findall(r'(?:src|href)="(/[^"]+)"', index.text)
        assert len(addresses) > 10 and "/page/-/" not in index.text
        for address in addresses:
            file = await browser.get(address)
            assert file.status_code == 200, address
            assert "immutable" in file.headers["cache-control"]
            assert "unsafe" not in file.headers["content-security-policy"]
            assert file.headers["vary"] == "Accept-Encoding"
            plain = await browser.get(address, headers={"Accept-Encoding": "br, gzip;q=0"})
            assert plain.content == file.content and "content-encoding" not in plain.headers
            packed = not address.endswith(".woff2")
            assert file.headers.get("content-encoding") == ("gzip" if packed else None), address
        assert (await browser.head("/")).status_code == 200
        script = next(address for address in addresses if address.endswith("main.js"))
        assert (await browser.get(script)).headers["content-type"] == "text/javascript; charset=utf-8"
        missing = [script.replace("main.js", name) for name in ("nosuch.js", "../app.py", "%2e%2e/app.py")]
        for wrong in (*missing, "/page/0000000000000000/main.js", "/page/", "/page/x"):
            assert (await browser.get(wrong)).status_code == 404, wrong


async def _session(settings: ServeSettings) -> None:
    async with client(settings) as browser:
        question = await browser.get("/v1/session", headers={"X-Requested-With": "inweave"})
        assert question.status_code == 401
        assert "Basic" not in question.headers["www-authenticate"]  # the browser would show a dialog of its own
        assert "Basic" in (await browser.get("/v1/session")).headers["www-authenticate"]
        assert (await browser.post("/v1/session", headers={"Authorization": "Bearer wrong"})).status_code == 401
        opened = await browser.post("/v1/session", headers={"Authorization": f"Bearer {TOKEN}"})
        cookie = opened.headers["set-cookie"]
        assert opened.json() == {"token_required": True}
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert (await browser.get("/v1/session")).status_code == 200  # the cookie alone
        crossing = await browser.post("/v1/queue", json={"paused": True}, headers={"Origin": "http://evil.example"})
        assert crossing.status_code == 403
        await browser.delete("/v1/session")
        assert (await browser.get("/v1/session")).status_code == 401
        for forged in ("x", "", TOKEN, "\u00e9"):
            header = f"inweave_session_{settings.port}={forged}".encode("latin-1")
            assert (await browser.get("/v1/session", headers={b"Cookie": header})).status_code == 401


def test_the_page_needs_no_token_and_is_cached_by_its_contents(settings: ServeSettings) -> None:
    asyncio.run(_visit(settings))


def test_a_browser_gets_a_cookie_for_the_token(settings: ServeSettings) -> None:
    asyncio.run(_session(settings))


def test_a_change_on_disk_is_another_address(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script src="/page/-/main.js"></script>')
    (tmp_path / "main.js").write_text("1")
    page = Page(tmp_path)
    before = page.files
    assert page.files is before and before.digest in before.index().decode()
    (tmp_path / "main.js").write_text("two")
    assert page.files.digest != before.digest


def test_everything_together_is_within_the_budget() -> None:
    """The files on disk count, uncompressed, without images."""
    sizes = {
        path: (PAGE / path).stat().st_size for path in PageFiles.read(PAGE).contents if not path.startswith("icons/")
    }
    assert sum(sizes.values()) <= BUDGET, sorted(sizes.items(), key=lambda each: -each[1])[:12]
    assert _sent(sizes) <= SENT


def _sent(paths: Iterable[str]) -> int:
    """Return the bytes of these files as a browser receives them."""
    files = PageFiles.read(PAGE)
    return sum(len(files.compressed.get(path, files.contents[path])) for path in paths)


def test_a_first_visit_loads_what_it_shows_alone() -> None:
    """The frame and Generate, with everything they import; other views come with their stylesheets when they open."""
    imports, reached, waiting = _imports(static=True), set[str](), ["main.js", "views/generate.js"]
    while waiting:
        if (module := waiting.pop()) not in reached:
            reached.add(module)
            waiting += imports[module]
    reached |= {"index.html", *re.findall(r'"/page/-/([^"]+)"', (PAGE / "index.html").read_text())}
    sizes = {path: (PAGE / path).stat().st_size for path in reached}
    assert "vendor/preact.js" in reached and "views/train.js" not in reached
    assert sum(sizes.values()) <= FIRST, sorted(sizes.items(), key=lambda each: -each[1])[:12]
    assert _sent(reached) <= SENT_FIRST


def test_nothing_is_fetched_from_elsewhere_or_runs_around_the_policy() -> None:
    for path, content in PageFiles.read(PAGE).contents.items():
        if path.endswith((".js", ".css", ".html")) and not path.startswith("vendor/"):
            text = content.decode()
            assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
            assert not re.search(
                r"innerHTML|dangerouslySet|\beval\(|new Function|document\.write|\son\w+=\"|<script>", text
            ), path


def test_every_module_is_reached_by_imports_that_exist() -> None:
    imports = _imports()
    reached, waiting = set[str](), ["main.js", "theme.js"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            assert module in imports, f"{module} is imported and does not exist"
            reached.add(module)
            waiting += imports[module]
    assert {path for path in imports.keys() - reached if not path.startswith(("ui/", "lib/"))} == set()


def test_the_imports_have_no_circle() -> None:
    TopologicalSorter(_imports()).prepare()  # raises CycleError, which names the modules


def _imports(*, static: bool = False) -> dict[str, set[str]]:
    """Return the modules that each module imports, statically or not; types in comments are never fetched."""
    form = r"""from\s*["'](\.[^"']+)["']""" if static else r"""(?:from|import)\s*\(?\s*["'](\.[^"']+)["']"""
    imports = {}
    for module, content in PageFiles.read(PAGE).contents.items():
        if module.endswith(".js"):
            code = re.sub(r"/\*.*?\*/", "", content.decode(), flags=re.DOTALL)
            targets = re.findall(form, code)
            folder = (PAGE / module).parent
            imports[module] = {(folder / path).resolve().relative_to(PAGE.resolve()).as_posix() for path in targets}
    return imports
