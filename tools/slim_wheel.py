"""Make a wheel smaller: copy it without the entries whose names match.

python3 tools/slim_wheel.py FILE.whl 'REGEX'
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path


def slim(path: Path, unwanted: str) -> None:
    smaller = path.with_suffix(".slim")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if not re.search(unwanted, entry.filename):
                new.writestr(entry, old.read(entry))
    smaller.replace(path)


if __name__ == "__main__":
    slim(Path(sys.argv[1]), sys.argv[2])
