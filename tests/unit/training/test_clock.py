"""The system's clock jumps during a run: what is kept, the log's speeds and a resumed run do not depend on it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.tiny import file_bits, tiny

YEAR = 365 * 86_400.0


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_a_run_whose_clock_jumps_keeps_its_own_adapters_and_leaves_others(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"steps": 6, "save_every": 1, "keep_last": 2, "dialect": "peft"}
    other = tmp_path / "out" / "t-000777"  # of another run, written when the clock was ahead
    other.mkdir(parents=True)
    (other / "adapter_model.safetensors").write_bytes(b"")
    os.utime(other, (time.time() + 9 * YEAR,) * 2)
    plain = tiny(tmp_path / "plain", **settings).train()
    real, calls = time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return real() + (calls[0] % 3) * jump

    monkeypatch.setattr(time, "time", jumping)
    records: list[Any] = []
    run = tiny(tmp_path / "out", **settings)
    run.started += YEAR  # the run began before the clock was set back
    for _ in range(3):
        run.train_step()
        run._save()
    again = tiny(tmp_path / "out", resume="auto", **settings).train(on_record=records.append)
    adapters = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("t-0"))
    assert adapters == ["t-000005", "t-000777"], "keep_last = 2, and the last one is the file of the run"
    speeds = [record["steps_per_second"] for record in records if record.get("steps_per_second") is not None]
    assert all(0 < speed < 1e5 for speed in speeds)
    assert file_bits(again.path) == file_bits(plain.path) and calls[0] > 5
