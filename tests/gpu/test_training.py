"""Training on a GPU: a limit that is planned, held, measured and lifted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import weft  # noqa: E402
from weft.errors import MemoryBudgetError  # noqa: E402
from weft.train.session import check  # noqa: E402


def said(place: Path, **more: Any) -> Any:
    usual: dict[str, Any] = {
        "dataset": "weft/pixel", "output": str(place / "out"), "steps": 3, "seed": 1, "device": "cuda", "log_every": 1,
        "cache_dir": str(place / "cache"), "batch_size": 4,
    }  # fmt: skip
    return weft.TrainConfig.of(**{**usual, **more})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_limit_is_planned_held_measured_and_lifted(precision: str, tmp_path: Path) -> None:
    _, _, needs = check(said(tmp_path, batch_size=2, precision=precision))
    limit = needs["total_bytes"] - 1024
    told: list[dict[str, Any]] = []
    config = said(
        tmp_path, precision=precision, vram=f"{limit / 2**20:.4f}MiB", sample_every=2, sample_prompts=["cat face"]
    )
    done = weft.train(config, tell=told.append)
    assert len(done.losses) == 3 and all(loss == loss for loss in done.losses)
    measured = next(record for record in told if "measured_bytes" in record)
    assert measured["measured_bytes"] < 2 * measured["expected_bytes"] + (64 << 20), "and what cuDNN works with"
    assert [record["event"] for record in told if str(record.get("event")).startswith("sample")] == ["sample"]
    free = torch.cuda.mem_get_info()[0]
    assert torch.empty(min(free // 2, 8 << 30), dtype=torch.uint8, device="cuda").numel() > limit, (
        "there is no limit now"
    )


def test_what_does_not_fit_says_so(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="are not enough"):
        weft.train(said(tmp_path, vram="520MiB"))
