"""A wrong base is refused quickly, and the nearest names are those a person would pick."""

from __future__ import annotations

import time

import pytest

from inweave.exchange.check import check
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.nearest import NearestNames
from tests.support import hollow, stopwatch


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("transformer_blocks.3.attn.to_qq", "transformer_blocks.3.attn.to_q"),
        ("transformer_blocks_3_attn_to_kk", "transformer_blocks.3.attn.to_k"),
        ("transformer_blocks.40.attn.to_q", "transformer_blocks.18.attn.to_q"),
        ("single_transformer_block.37.proj_mlp", "single_transformer_blocks.37.proj_mlp"),
        ("zzzz", None),
    ],
)
def test_the_nearest_name_keeps_its_numbers(name: str, nearest: str | None) -> None:
    denoiser = known_index("flux1-dev").denoiser
    assert denoiser is not None
    assert NearestNames(denoiser.modules()).find(name) == nearest


def test_a_very_long_name_costs_no_more_than_a_long_one() -> None:
    denoiser = known_index("flux1-dev").denoiser
    assert denoiser is not None
    names = NearestNames(denoiser.modules())
    with stopwatch(time.thread_time) as cost:
        names.find("transformer_blocks.0." * 100_000)
    assert cost.seconds < 0.5


@pytest.mark.parametrize("base", ["sdxl", "flux1-dev", "wan2.1-t2v-14b"])
def test_a_wrong_base_is_refused_in_less_than_a_second(base: str) -> None:
    """Every name is of a form of its own, so that no answer can be reused."""
    names = [
        f"lora_unet_wrong_{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10 % 10]}_blocks_{i}_attn_to_q" for i in range(2000)
    ]
    tensors = {
        f"{name}.{leaf}.weight": hollow(shape)
        for name in names
        for leaf, shape in (("lora_down", (4, 64)), ("lora_up", (64, 4)))
    }
    adapter = read(tensors)
    with stopwatch(time.thread_time) as cost:
        verdict = check(adapter, base, values="none")
    assert cost.seconds < 1
    assert not verdict.ok
    assert len(verdict.report.unplaced) == 2000
    assert verdict.report.unplaced[0].nearest
