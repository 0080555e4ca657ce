"""The settings that torch reads when it is imported or when CUDA starts: set unless the user configured them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inweave.cli.environment import BLOCK_TIME, SPINS, use_bounded_waits, use_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", [None, *NAMES])
def test_segments_grow_unless_the_user_has_decided(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in NAMES:
        monkeypatch.setenv(known, "")  # so that it is put back
        monkeypatch.delenv(known)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    values = {known: os.environ[known] for known in NAMES if known in os.environ}
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name is None else {name: "max_split_size_mb:64"}
    assert values == expected
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "7"}])
def test_threads_sleep_soon_unless_the_user_has_decided(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    use_bounded_waits(environment)
    ours = {} if "OMP_WAIT_POLICY" in chosen else {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": BLOCK_TIME}
    assert environment == ours | chosen


@pytest.mark.skipif(sys.platform != "linux", reason="only libgomp shows its settings")
def test_the_library_of_torch_sees_the_setting(tmp_path: Path) -> None:
    """It reads its variables when it is loaded, so a setting that comes later has no effect."""
    from importlib.util import find_spec

    libraries = Path(str(find_spec("torch").origin)).parent / "lib"
    if not list(libraries.glob("libgomp*")):
        pytest.skip("this torch has another library")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-m", "inweave", "resize", "pixel", "--rank", "2", "-o", "a.safetensors"],
        cwd=tmp_path, env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [SPINS], done.stderr
