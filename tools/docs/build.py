"""Build the Python API reference from the docstrings: `make docs` writes build/docs/, without network access.

The names of `inweave` are imported when first used; here all of them are, so that pdoc finds the objects. They are
listed in the order of the package's groups (read, weave, layers, ...) instead of by alphabet, and the settings of a
configuration as one table.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

import pdoc
import pdoc.render
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import inweave


def main(folder: Path) -> None:
    exports = {name: getattr(inweave, name) for name in inweave._HOME}
    vars(inweave).update(exports, __all__=list(exports))
    models = {
        name: value for name, value in exports.items() if isinstance(value, type) and issubclass(value, BaseModel)
    }
    for model in models.values():
        model.__doc__ = f"{model.__doc__}\n\n{settings_table(model)}"
    pdoc.render.configure(
        footer_text=f"inweave {inweave.__version__}", show_source=False, template_directory=Path(__file__).parent
    )
    pdoc.render.env.globals["setting_names"] = {
        f"{n}.{field}" for n, model in models.items() for field in model.model_fields
    }
    pdoc.pdoc("inweave", output_directory=folder)
    page = (folder / "inweave.html").read_text("utf-8")
    missing = [name for name in exports if f'id="{name}"' not in page]
    if missing:
        sys.exit(f"the reference lacks {', '.join(missing)}")
    print(f"{folder / 'inweave.html'}: {len(exports)} public names")


def settings_table(model: type[BaseModel]) -> str:
    """Return a Markdown table of the fields, with a row for every group of them."""
    lines, group = ["| setting | default | meaning |", "|---|---|---|"], None
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("group") != group:
            group = extra.get("group")
            lines.append(f"| **{group}** | | |")
        lines.append(f"| `{name}` | {_default(field)} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else f"`{_cell(repr(value), code=True)}`"


def _cell(text: str, *, code: bool = False) -> str:
    return (text if code else html.escape(text, quote=False)).replace("|", "\\|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
