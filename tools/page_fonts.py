"""Cut the fonts of the page down to what it shows: `pip install fonttools brotli`, `npm install --no-save`, then run this.

    python tools/page_fonts.py

The page has 300 KB for everything, and kerning tables, hints and rare characters would be a tenth of that. What is left out
comes from the reader's own fonts. `tests/page/fonts.json` keeps the digests of what was read and of what was written, and
`npm run check` compares them with node_modules and with the page.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "inweave" / "serve" / "page"
RECORD = ROOT / "tests" / "page" / "fonts.json"
ASCII, PUNCTUATION = "U+0020-007E", "U+2013-2014,U+2018-201D,U+2026,U+2190-2193"
#: the text of names and prompts; the headings
FONTS = {
    "fonts/instrument-sans.woff2": (
        "@fontsource-variable/instrument-sans/files/instrument-sans-latin-wght-normal.woff2",
        f"{ASCII},U+00A0-00FF,{PUNCTUATION}",
    ),
    "fonts/instrument-serif.woff2": (
        "@fontsource/instrument-serif/files/instrument-serif-latin-400-normal.woff2",
        f"{ASCII},U+00D7,{PUNCTUATION}",
    ),
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    from fontTools import subset  # type: ignore[import-not-found]  # a tool of whoever changes the fonts

    record = {}
    for name, (package_path, characters) in FONTS.items():
        source, target = ROOT / "node_modules" / package_path, PAGE / name
        options = [f"--unicodes={characters}", "--flavor=woff2", "--no-hinting", "--layout-features=tnum"]
        subset.main([str(source), *options, f"--output-file={target}"])
        record[name] = {"from": package_path, "from_sha256": digest(source), "sha256": digest(target)}
        print(f"{name}: {target.stat().st_size:,} bytes")
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
