"""`inweave train --check` as a process: what it may import, and how much memory it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

#: a process that reports its own peak: ru_maxrss would remember the process that started it
_PROGRAM = """
import json, re, sys
from pathlib import Path
sys.argv = ["inweave", *sys.argv[1:]]
try:
    if sys.argv[1:]:
        from inweave.cli.app import app
        app()
    else:
        import torch, torch._dynamo
finally:
    status = Path("/proc/self/status").read_text()
    report = {"peak": int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) << 10, "modules": sorted(sys.modules)}
    print(json.dumps(report), file=sys.stderr)
"""
#: libraries that no part of a check of the embedded model needs
_NEEDLESS = ("diffusers", "transformers", "scipy", "peft")
#: beyond torch and its compiler, which torch imports for gradient checkpointing and for kernels on the meta device:
#: 373 MB on one x86-64 machine and 445 on another, with the same wheel, so the sum cannot be a bound
LIMIT = 120 * 10**6


def measure(*arguments: str) -> tuple[dict[str, Any], str]:
    """Return what a process reports that runs a command, or else imports torch, and the command's output."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, check=True, text=True)
    return json.loads(done.stderr.splitlines()[-1]), done.stdout


@pytest.fixture(scope="module")
def torch_peak() -> int:
    return int(measure()[0]["peak"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_a_check_of_the_embedded_model_takes_little_more_than_torch(
    checkpointing: str, torch_peak: int, tmp_path: Path
) -> None:
    report, output = measure(
        "train", "--dataset", "inweave/pixel", "--steps", "2", "--check", "--json",
        "--set", f"gradient_checkpointing={checkpointing}", "--set", f"cache_dir={tmp_path / 'cache'}",
        "--output", str(tmp_path / "out"), "--set", "device=cpu",
    )  # fmt: skip
    assert json.loads(output)["ok"]
    assert not [name for name in report["modules"] if name in _NEEDLESS]
    assert report["peak"] <= torch_peak + LIMIT, f"{report['peak'] / 1e6:.0f} MB, torch {torch_peak / 1e6:.0f}"
