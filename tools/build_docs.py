"""Build the Python API reference from the docstrings: `make docs` writes build/docs/, without network access.

The names of `inweave` are imported when first used; here all of them are, so that pdoc finds the objects. They are listed
in the order of the package's groups (read, weave, layers, ...) instead of by alphabet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc
import pdoc.render

import inweave


def main(folder: Path) -> None:
    namespace = vars(inweave)
    namespace.update({name: getattr(inweave, name) for name in inweave.__all__})
    namespace["__all__"] = list(inweave._HOME)
    pdoc.render.configure(footer_text=f"inweave {inweave.__version__}", show_source=False)
    pdoc.pdoc("inweave", output_directory=folder)
    page = (folder / "inweave.html").read_text("utf-8")
    missing = [name for name in inweave.__all__ if f'id="{name}"' not in page]
    if missing:
        sys.exit(f"the reference lacks {', '.join(missing)}")
    print(f"{folder / 'inweave.html'}: {len(inweave.__all__)} public names")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
