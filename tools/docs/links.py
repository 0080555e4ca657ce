"""The links of a built site: each leads to a file of it and an anchor there; nothing is loaded from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The anchors of a page, the links it has, and the files it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        address = values.get("href") or values.get("src")
        if not address:
            return
        follows = values.get("rel") in ("canonical", "prev", "next")
        self.links.append(address)
        if tag != "a" and not follows:
            self.loads.append(address)


def problems_of(folder: Path) -> list[str]:
    """Return what is wrong with the links of all pages, one line each."""
    pages = {path.resolve(): _Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are from the root of a server
            continue
        where = path.relative_to(folder.resolve())
        problems += [f"{where}: loads {each}" for each in page.loads if urlsplit(each).netloc]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                problems.append(f"{where}: {link}: no such page")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{where}: {link}: no such anchor")
    return problems
