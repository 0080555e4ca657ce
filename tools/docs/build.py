"""Build the documentation as one site with search: `make docs` writes build/docs/, without network access.

    README.md, docs/, CONTRIBUTING.md, CHANGELOG.md    the guides, copied; their links are those of the repository
    the docstrings of the public names                 a page of the API for each group: read, weave, layers, ...

MkDocs with the Material theme renders both and makes the search index. Then every link and anchor of the site is
followed (`links.py`); one that leads nowhere, or a script from elsewhere, fails the build.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from links import problems_of
from pydantic import BaseModel

import inweave

ROOT = Path(__file__).parents[2]
#: pages in the order of a reader, by group; every page of docs/ is in one, or the build fails
NAVIGATION = {
    "Start": ["index", "tutorial", "recipes", "cards", "pipelines", "troubleshooting"],
    "Guides": ["generating", "training", "importing", "formats", "serving", "deploying", "page", "coming-from"],
    "Behind it": ["architecture", "files", "embedded-model", "reliability", "benchmarks", "kernels"],
    "Project": ["contributing", "changelog"],
}
#: pages outside of docs/, and their names on the site
_MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]*)?(\))")


def main(folder: Path) -> None:
    """Build the site in ``folder``, which is replaced."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as temporary:
        pages = Path(temporary) / "pages"
        shutil.copytree(ROOT / "docs", pages)
        for source, name in _MOVED.items():
            shutil.copy(ROOT / source, pages / name)
        written = dict(api_pages())
        (pages / "api").mkdir()
        for name, text in written.items():
            (pages / "api" / f"{name}.md").write_text(text, "utf-8")
        guides = {path.stem for path in pages.glob("*.md")}
        if guides != (listed := {name for names in NAVIGATION.values() for name in names}):
            sys.exit(f"NAVIGATION differs from the pages in {', '.join(sorted(guides ^ listed))}")
        for path in pages.glob("*.md"):
            path.write_text(_site_links(path.read_text("utf-8"), pages), "utf-8")
        navigation: list[Any] = [{group: [f"{name}.md" for name in names]} for group, names in NAVIGATION.items()]
        navigation.insert(2, {"Python API": [f"api/{name}.md" for name in written]})
        settings = {
            "site_name": f"inweave {inweave.__version__}", "docs_dir": str(pages), "site_dir": str(folder.resolve()),
            "use_directory_urls": False, "nav": navigation, "plugins": ["search"], "exclude_docs": "bench/*.md",
            "theme": {
                "name": "material", "font": False,
                "features": ["search.highlight", "search.suggest", "content.code.copy", "toc.follow"],
            },
        }  # fmt: skip
        file = Path(temporary) / "mkdocs.yml"
        file.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
        build(load_config(str(file)))
    if problems := problems_of(folder):
        sys.exit("\n".join(problems))
    print(f"{folder / 'index.html'}: {len(guides)} guides, {len(inweave.__all__)} public names")
    print(f"with search: python -m http.server --directory {folder}")


def _site_links(text: str, pages: Path) -> str:
    """Return a guide with its links as on the site; other files of the repository are copied to it."""

    def renamed(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        name = target.removeprefix("../").removeprefix("docs/")
        name = _MOVED.get(name, name)
        if target and not (pages / name).exists() and (ROOT / name).is_file():
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            copy = pages / (name if not name.endswith(".md") else f"{name}.txt")
            shutil.copy(ROOT / name, copy)
            name = str(copy.relative_to(pages))
        return f"{start}{name}{anchor or ''}{end}"

    return _LINK.sub(renamed, text)


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield (name, Markdown) for the package and for each part of it that has public names."""
    from pdoc.docstrings import google

    yield "inweave", f"# inweave\n\n{google(inspect.getdoc(inweave) or '')}\n"
    groups: dict[str, list[str]] = {}
    for name, module in inweave._HOME.items():
        groups.setdefault(module.split(".")[1], []).append(name)
    for group, names in groups.items():
        yield group, "\n\n".join([f"# inweave: {group}", *(_entry(name) for name in sorted(names))])


def _entry(name: str) -> str:
    """Return the heading, the signature and the docstring of a public name, and of its methods."""
    value = getattr(inweave, name)
    parts = [f"## {name}", _documented(f"inweave.{name}", value)]
    if isinstance(value, type):
        if issubclass(value, BaseModel):
            parts.append(settings_table(value))
        for key, member in vars(value).items():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            member = member.fget if isinstance(member, property) else member
            if not key.startswith("_") and inspect.isfunction(member) and member.__doc__:
                parts += [f"### {name}.{key}", _documented(key, member)]
    return "\n\n".join(parts)


def _documented(name: str, value: Any) -> str:
    from pdoc.docstrings import google

    try:
        signature = f"```python\n{name}{inspect.signature(value)}\n```\n\n"
    except (TypeError, ValueError):  # a protocol, or a class without a signature of its own
        signature = ""
    if isinstance(value, type) and issubclass(value, BaseModel):
        signature = ""  # a table lists the settings
    return signature + google(inspect.getdoc(value) or "")


def settings_table(model: type[BaseModel]) -> str:
    """Return a Markdown table of the fields, with a row for every group of them."""
    lines, group = ["| setting | default | meaning |", "|---|---|---|"], None
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("group") != group:
            group = extra.get("group")
            lines.append(f"| **{group}** | | |")
        value: Any = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        default = "required" if field.is_required() else "" if value is None else f"`{_cell(repr(value), code=True)}`"
        lines.append(f"| `{name}` | {default} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def _cell(text: str, *, code: bool = False) -> str:
    return (text if code else html.escape(text, quote=False)).replace("|", "\\|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
