"""`inweave train --check` as a process: what it may import, and how much memory it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

#: a process that reports its own peak: ru_maxrss would remember the process that started it
_PROGRAM = """
import json, re, sys
from pathlib import Path
from inweave.cli.app import app
sys.argv = ["inweave", *sys.argv[1:]]
try:
    app()
finally:
    status = Path("/proc/self/status").read_text()
    report = {"peak": int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) << 10, "modules": sorted(sys.modules)}
    print(json.dumps(report), file=sys.stderr)
"""
#: libraries that no part of a check of the embedded model needs
_NEEDLESS = ("diffusers", "transformers", "scipy", "peft")
LIMIT = 480 * 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_a_check_of_the_embedded_model_takes_little_more_than_torch(checkpointing: str, tmp_path: Path) -> None:
    """At most LIMIT; of that, `import torch` alone takes 229 MB, and torch's compiler, which torch imports, 110."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "train", "--dataset", "inweave/pixel", "--steps", "2", "--check", "--json",
         "--set", f"gradient_checkpointing={checkpointing}", "--set", f"cache_dir={tmp_path / 'cache'}",
         "--output", str(tmp_path / "out"), "--set", "device=cpu"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["ok"]
    report = json.loads(done.stderr.splitlines()[-1])
    assert not [name for name in report["modules"] if name in _NEEDLESS]
    assert report["peak"] <= LIMIT, f"{report['peak'] / 1e6:.0f} MB"
