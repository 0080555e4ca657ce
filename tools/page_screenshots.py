"""Take the screenshots of the page in docs/images: `make screenshots` (needs Chromium and npm's packages).

The script starts a worker with the embedded model; tests/page/screenshots.mjs drives the browser. With a folder as
argument, it writes screenshots of every view and state on a phone, two desktops and a 4K screen, in light and dark, to
that folder, with twenty LoRAs of long names; a second argument takes those whose name contains it.
Text is in the system font, as on the page; `FONTS` prefers those that desktops have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image

from inweave.models import embedded

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 120_000
READY_SECONDS = 300
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <include>/etc/fonts/fonts.conf</include>
  <match target="pattern">
    <test qual="any" name="family"><string>sans-serif</string></test>
    <edit name="family" mode="prepend" binding="strong">
      <string>Inter</string><string>Cantarell</string><string>Noto Sans</string>
    </edit>
  </match>
</fontconfig>
"""


def wait_until_ready(address: str) -> None:
    for _ in range(READY_SECONDS):
        try:
            urllib.request.urlopen(f"{address}/ready")
            return
        except urllib.error.HTTPError:  # 503 while the model loads
            time.sleep(1)
    raise SystemExit(f"the worker at {address} is not ready after {READY_SECONDS} s")


def long_names(folder: Path) -> None:
    """Write twenty LoRAs whose names do not fit."""
    folder.mkdir()
    sources = sorted((embedded.folder() / "loras").glob("*.safetensors"))
    for number in range(20):
        name = f"detailed-watercolor-illustration-with-soft-edges-v1.5_epoch-{number:06}_fp16"
        if number % 3 == 0:
            name = f"TheLongNameOfACharacterWithoutAnySpaceOrDash{number}"
        shutil.copyfile(sources[number % len(sources)], folder / f"{name}.safetensors")


def main(folder: str | None = None, only: str = "") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        shots = Path(folder or f"{temporary}/shots")
        shots.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "inweave", "serve", "--port", "0", "--data", f"{temporary}/data"]
        if folder:
            long_names(loras := Path(temporary, "loras"))
            command += ["--lora-dir", str(loras), "--plan-seconds", "600"]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None
            address = worker.stdout.readline().split()[-1]
            wait_until_ready(address)
            script = ROOT / "tests" / "page" / "screenshots.mjs"
            fonts = Path(temporary, "fonts.conf")
            fonts.write_text(FONTS)
            options = [address, str(shots), *(["--all", "--only", only] if folder else [])]
            environment = {**os.environ, "FONTCONFIG_FILE": str(fonts)}
            subprocess.run(["node", str(script), *options], check=True, env=environment)
        finally:
            worker.terminate()
            worker.wait()
        if folder:
            return
        for path in sorted(shots.glob("*.png")):
            target = IMAGES / f"{path.stem}.webp"
            Image.open(path).convert("RGB").save(target, quality=82, method=6)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")
            if target.stat().st_size > MAX_BYTES:
                raise SystemExit(f"{target} has more than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:3])
