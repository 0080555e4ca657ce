"""A short training run on a bundled style moves images toward it, as measured by the embedded benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")

import inweave
from inweave.bench.embedded import closer_to_style, style_set

UNSEEN = ("cat face", "rocket", "pizza", "octopus")


@pytest.mark.full  # a minute; the losses of a shorter run are compared in tests/peers/test_train_parity.py
def test_a_style_is_trained(tmp_path: Path) -> None:
    config = inweave.TrainConfig.of(
        dataset="inweave/pixel", output=str(tmp_path), steps=60, seed=1, device="cpu", cache_dir=str(tmp_path / "cache")
    )
    report = inweave.train(config)
    assert sum(report.losses[-20:]) < 0.6 * sum(report.losses[:20])

    pipe = inweave.pipeline("inweave/emoji", device="cpu")
    by_strength = {
        strength: [pipe(name, seed=5, steps=8, loras=[f"{report.path}:{strength}"]).images[0] for name in UNSEEN]
        for strength in (0, 1)
    }
    style = style_set("pixel")[1]
    distances = closer_to_style(by_strength[1], style, by_strength[0])
    without = closer_to_style(by_strength[0], style, style)
    assert distances["to_style"] < 0.85 * without["to_style"], distances
