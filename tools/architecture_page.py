"""Renew the generated parts of docs/architecture.md, files.md and formats.md: `python tools/architecture_page.py`.

Tiers, packages and rooms come from the table that tests/arch enforces, the file tree from the first line of every
module docstring, the dialects from their registry, so no page can disagree with the code; a test compares them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.arch.layout import PACKAGES, ROOMS, SRC, tree_of  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
TREE = ROOT / "docs" / "files.md"
FORMATS = ROOT / "docs" / "formats.md"
_ENDS = ("__init__", "__main__", "version")  # files rather than packages


def tiers() -> str:
    """Draw the tiers from the top down; packages of one line do not know each other."""
    by_height = sorted(
        ((package.height, name) for name, package in PACKAGES.items() if name not in _ENDS), reverse=True
    )
    lines = []
    for _, group in groupby(by_height, key=lambda pair: pair[0]):
        names = sorted(name for _, name in group)
        purpose = PACKAGES[names[0]].purpose if len(names) == 1 else ""
        lines.append(f" {' | '.join(names):<50}{purpose}".rstrip())
    return "```\n" + "\n".join(lines) + "\n```"


def packages() -> str:
    """Write the table of packages with their purpose and the libraries that they may import."""
    rows = ["| package | purpose | third-party imports |", "|---|---|---|"]
    for name, package in PACKAGES.items():
        folder = f"`{name}/`" if (SRC / name).is_dir() else f"`{name}.py`"
        rows.append(f"| {folder} | {package.purpose} | {', '.join(package.libraries) or 'none'} |")
    return "\n".join(rows)


def rooms(package: str) -> str:
    """Write the rooms of a package from the top down."""
    width = max(map(len, ROOMS[package])) + 2
    lines = [f" {name:<{width}}{purpose}" for name, purpose in reversed(ROOMS[package].items())]
    return "```\n" + "\n".join(lines) + "\n```"


def purpose_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[^. ]{2})\. |:$", text)[0].rstrip(".:")


def file_tree() -> str:
    """Write every folder with its files, a line each."""
    return "\n".join(_folder(SRC, 2))


def _folder(folder: Path, level: int) -> Iterator[str]:
    title = "inweave" if folder == SRC else str(folder.relative_to(SRC))
    yield f"{'#' * min(level, 4)} {title}/"
    yield ""
    if folder != SRC:
        yield f"{purpose_of(folder / '__init__.py')}."
        yield ""
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py" or folder == SRC)
    if files:
        yield "| file | purpose |"
        yield "|---|---|"
        for path in files:
            yield f"| `{path.name}` | {purpose_of(path).replace('|', chr(92) + '|')} |"
        yield ""
    for child in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _folder(child, level + 1)


def dialects() -> str:
    """Write the table of the dialects: the registry's order, written ones first."""
    from inweave.formats.dialects import READ, WRITTEN
    from inweave.formats.dialects import dialects as registered

    by_name = {each.name: each for each in registered()}
    rows = ["| dialect | made by; read by | written | prefixes of its names |", "|---|---|---|---|"]
    for name in (*WRITTEN, *READ):
        each = by_name[name]
        prefixes = sorted({prefix for prefix, _ in (*each.flat_prefixes, *each.dotted_prefixes)})
        cells = (f"`{name}`", each.description, "yes" if each.form is not None else "no")
        rows.append(f"| {' | '.join(cells)} | {', '.join(f'`{prefix}`' for prefix in prefixes)} |")
    return "\n".join(rows)


def render(text: str) -> str:
    """Return a page with its generated parts renewed."""
    parts = {
        "tiers": tiers,
        "packages": packages,
        **{f"rooms of {package}": partial(rooms, package) for package in ROOMS},
        "files": file_tree,
        "dialects": dialects,
    }
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda match, part=part: match[1] + part().rstrip("\n") + match[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for page in (PAGE, TREE, FORMATS):
        page.write_text(render(page.read_text("utf-8")), "utf-8")
