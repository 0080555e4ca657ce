"""Reduce the font of the headings to the characters in use.

    pip install fonttools brotli; npm install --no-save; python tools/page_fonts.py

The page has 300 KB for everything, and kerning tables, hints and rare characters would be a tenth of that. Other
characters come from the reader's own fonts, as all other text does. `tests/page/fonts.json` keeps the digests of source
and result, and `npm run check` compares them with node_modules and with the page.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "inweave" / "serve" / "page"
RECORD = ROOT / "tests" / "page" / "fonts.json"
#: letters, digits and a little punctuation
HEADINGS = "U+0020,U+0021,U+0026-0029,U+002C-003A,U+003F,U+0041-005A,U+0061-007A,U+00D7,U+2019,U+2026"
FONTS = {
    "fonts/instrument-serif.woff2": (
        "@fontsource/instrument-serif/files/instrument-serif-latin-400-normal.woff2",
        HEADINGS,
    ),
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    from fontTools import subset  # type: ignore[import-not-found]  # not a dependency: only this tool needs it

    record = {}
    for name, (package_path, characters) in FONTS.items():
        source, target = ROOT / "node_modules" / package_path, PAGE / name
        options = [
            f"--unicodes={characters}",
            "--flavor=woff2",
            "--no-hinting",
            "--layout-features=",
            "--name-IDs=",
        ]
        subset.main([str(source), *options, f"--output-file={target}"])
        record[name] = {"from": package_path, "from_sha256": digest(source), "sha256": digest(target)}
        print(f"{name}: {target.stat().st_size:,} bytes")
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
