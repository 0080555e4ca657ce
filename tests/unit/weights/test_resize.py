"""Resizing and combining: the product is the best of its rank, the sum of the parts, and the report is true."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inweave.adapter import Adapter, Entry, Full, Lora, Tensor
from inweave.errors import ConfigError, TargetError
from inweave.exchange.convert import save
from inweave.exchange.load import load
from inweave.formats.read import read
from inweave.ops.tensors.decode import decode
from inweave.targets.links import Naming
from inweave.weights.offline.resize import Resized, chosen_rank, resize_stack
from inweave.weights.stack import Strength
from tests.golden.weave import Base, small, torch_base
from tests.support import random, tensor
from tests.unit.weights.models import adapter, pair

NET = torch_base(
    {"first.weight": (20, 14), "first.bias": (20,), "second.weight": (12, 12), "conv.weight": (10, 6, 3, 3),
     "grouped.weight": (12, 4, 3, 3), "norm.weight": (12,), "norm.bias": (12,)}
)  # fmt: skip
FLUX, FUSED = small("flux1-dev"), small("flux1-dev", "original")


def lora_of(entry: Entry) -> Lora:
    assert isinstance(entry.factors, Lora)
    return entry.factors


def resized(stack, base: Base = NET, naming: Naming = "diffusers", **options) -> Resized:  # type: ignore[no-untyped-def]
    parts = [(lora if isinstance(lora, Adapter) else adapter(lora), Strength.of(strength)) for lora, strength in stack]
    return resize_stack(parts, base.index, lambda component: naming, **options)


def deltas(lora: Adapter | Mapping[str, Tensor], base: Base = NET, strength: float = 1.0) -> dict[str, torch.Tensor]:
    return base.changes(lora, strength)


def close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert float(value.norm()) > 1e-6, "nothing is compared"
        assert float((actual[name] - value).norm() / value.norm()) <= tolerance, name


def summed(*parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def conv(seed: int, rank: int = 3) -> dict[str, Tensor]:
    return {"unet.conv.lora_down.weight": random(seed, rank, 6, 3, 3),
        "unet.conv.lora_up.weight": random(seed + 1, 10, rank, 1, 1),
            "unet.conv.alpha": tensor(2.0)}  # fmt: skip


def tucker(seed: int, rank: int = 3) -> dict[str, Tensor]:
    return {"unet.conv.lora_down.weight": random(seed, rank, 6, 1, 1),
        "unet.conv.lora_up.weight": random(seed + 1, 10, rank, 1, 1),
            "unet.conv.lora_mid.weight": random(seed + 2, rank, rank, 3, 3),
            "unet.conv.alpha": tensor(1.5)}  # fmt: skip


def test_combining_at_full_rank_is_the_sum() -> None:
    one = pair("unet.first", 20, 14, 3, 1, alpha=2.0) | conv(5) | {"unet.first.diff_b": random(8, 20)}
    two = pair("unet.first", 20, 14, 4, 21, alpha=1.0) | tucker(25) | {"unet.first.diff_b": random(28, 20)}
    three = pair("unet.second", 12, 12, 2, 41) | {
        "unet.norm.w_norm": random(44, 12),
        "unet.norm.b_norm": random(45, 12),
    }
    result = resized([(one, 0.8), (two, -0.5), (three, 1.7)], dtype=torch.float32)
    close(
        deltas(result.adapter),
        summed(deltas(one, strength=0.8), deltas(two, strength=-0.5), deltas(three, strength=1.7)),
    )
    ranks = {row.module: (row.before, row.rank) for row in result.rows}
    assert ranks == {"model:first": (7, 7), "model:conv": (6, 6), "model:second": (2, 2)}
    assert result.energy == pytest.approx(1)
    for entry in result.adapter.entries:
        if isinstance(entry.factors, Lora):
            assert entry.factors.scale == 1 and entry.factors.alpha == entry.factors.rank


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 1000), st.integers(1, 8), st.integers(1, 8), st.floats(-2, 2), st.sampled_from(["first", "second"])
)
def test_two_adapters_at_any_rank_and_strength(seed: int, r1: int, r2: int, strength: float, module: str) -> None:
    out, into = (20, 14) if module == "first" else (12, 12)
    one, two = pair(f"unet.{module}", out, into, r1, seed, alpha=3.0), pair(f"unet.{module}", out, into, r2, seed + 50)
    result = resized([(one, 1.0), (two, strength)], dtype=torch.float32)
    exact = summed(deltas(one), deltas(two, strength=strength))[f"{module}.weight"]
    got = deltas(result.adapter)[f"{module}.weight"]
    scale = float(deltas(one)[f"{module}.weight"].norm())
    assert float((got - exact).norm()) <= 1e-5 * (scale + float(exact.norm()))


@pytest.mark.parametrize(
    "lora", [pair("unet.first", 20, 14, 9, 3, alpha=4.0), conv(3, 9), tucker(3, 8)], ids=["linear", "conv", "tucker"]
)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_a_lower_rank_is_the_best_of_that_rank(lora: dict[str, Tensor], rank: int) -> None:
    result = resized([(lora, 1.0)], rank=rank, dtype=torch.float32)
    ((name, exact),) = deltas(lora).items()
    u, sigma, vh = torch.linalg.svd(exact.flatten(1))
    best = (u[:, :rank] * sigma[:rank]) @ vh[:rank]
    close({name: deltas(result.adapter)[name].flatten(1)}, {name: best}, 1e-5)
    (row,) = result.rows
    assert row.rank == rank
    assert row.energy == pytest.approx(float(sigma[:rank].square().sum() / sigma.square().sum()), rel=1e-6)
    assert row.norm == pytest.approx(float(exact.square().sum()), rel=1e-5)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 1.0])
def test_the_requested_energy_is_reached_and_no_rank_is_wasted(energy: float) -> None:
    lora = pair("unet.first", 20, 14, 10, 3) | pair("unet.second", 12, 12, 6, 9)
    result = resized([(lora, 1.0)], energy=energy, dtype=torch.float32)
    exact = deltas(lora)
    for name, value in exact.items():
        squares = torch.linalg.svdvals(value).square()
        row = next(row for row in result.rows if row.module == f"model:{name.removesuffix('.weight')}")
        assert row.energy >= energy - 1e-9
        assert row.rank == 1 or float(squares[: row.rank - 1].sum() / squares.sum()) < energy
        lost = float((deltas(result.adapter)[name] - value).square().sum() / squares.sum())
        assert lost == pytest.approx(1 - row.energy, abs=1e-6)
    capped = resized([(lora, 1.0)], energy=energy, rank=2)
    assert all(row.rank <= 2 for row in capped.rows)


def test_one_file_keeps_the_bits_of_what_is_small_enough() -> None:
    lora = pair("unet.first", 20, 14, 8, 3, alpha=4.0) | pair("unet.second", 12, 12, 2, 9, alpha=5.0)
    result = resized([(lora, 1.0)], rank=4)
    entries = {entry.ref.name: lora_of(entry) for entry in result.adapter.entries}
    assert entries["first"].rank == 4 and entries["first"].alpha == 4.0
    assert entries["second"].down.same(lora["unet.second.lora_down.weight"])
    assert entries["second"].alpha == 5.0
    for rank in (8, 64):
        same = resized([(lora, 1.0)], rank=rank)
        assert all(lora_of(e).up.same(lora[f"unet.{e.ref.name}.lora_up.weight"]) for e in same.adapter.entries)


def test_one_file_keeps_other_kinds_and_names_them() -> None:
    lora = pair("unet.first", 20, 14, 8, 3) | {"unet.first.diff_b": random(8, 20)}
    lora |= {"unet.second.lokr_w1": random(1, 3, 3), "unet.second.lokr_w2": random(2, 4, 4)}
    lora |= conv(5) | {"unet.conv.dora_scale": tensor([[[[1.0]]]] * 10)}
    result = resized([(lora, 1.0)], rank=2)
    assert set(result.unchanged) == {"model:second.weight", "model:conv.weight", "model:first.bias"}
    before, after = deltas(lora), deltas(result.adapter)
    for name in ("second.weight", "conv.weight", "first.bias"):
        assert torch.equal(before[name], after[name])
    with pytest.raises(TargetError, match=r"2 modules cannot be combined:(.|\n)*lokr(.|\n)*dora"):
        resized([(lora, 1.0), (lora, 1.0)], rank=2)
    with pytest.raises(TargetError, match="cannot be combined"):
        resized([(lora, 0.5)], rank=2)


def test_dtypes_follow_the_sources() -> None:
    half = {
        key: random(3 + n, *value.shape, dtype="F16")
        for n, (key, value) in enumerate(pair("unet.first", 20, 14, 6).items())
    }
    single = pair("unet.first", 20, 14, 6, 9)
    dtype_of = lambda result: result.adapter.entries[0].factors.up.dtype  # noqa: E731
    assert dtype_of(resized([(half, 1.0)], rank=2)) == "F16"
    assert dtype_of(resized([(half, 1.0), (single, 1.0)], rank=2)) == "F32"
    assert dtype_of(resized([(single, 1.0)], rank=2, dtype=torch.bfloat16)) == "BF16"
    loud = pair("unet.first", 20, 14, 6, alpha=6e12)
    with pytest.raises(TargetError, match=r"first: a factor would overflow F16"):
        resized([(loud, 1.0)], rank=2, dtype=torch.float16)


def test_alpha_stays_absent_where_no_source_had_one() -> None:
    result = resized([(pair("unet.first", 20, 14, 6), 0.5), (pair("unet.first", 20, 14, 6, 9), 1.0)], rank=3)
    assert result.adapter.entries[0].factors.alpha is None
    mixed = resized([(pair("unet.first", 20, 14, 6), 0.5), (pair("unet.second", 12, 12, 6, 9, alpha=1.0), 1.0)], rank=3)
    assert {entry.factors.alpha for entry in mixed.adapter.entries} == {3.0}


def test_explicit_and_rslora_scales_are_folded() -> None:
    config = {"peft_type": "LORA", "r": 6, "lora_alpha": 3, "use_rslora": True, "target_modules": ["first"]}
    tensors = {
        "base_model.model.first.lora_A.weight": random(1, 6, 14),
        "base_model.model.first.lora_B.weight": random(2, 20, 6),
    }
    one = read(tensors, {}, config)
    two = pair("unet.first", 20, 14, 2, 9) | {"unet.first.scale": tensor(0.3)}
    result = resized([(one, 1.0), (two, 2.0)], dtype=torch.float32)
    close(deltas(result.adapter), summed(deltas(one), deltas(two, strength=2.0)))


def test_grouped_convolutions_become_plain_pairs() -> None:
    lora = {
        "unet.grouped.lora_down.weight": random(1, 6, 4, 3, 3),
        "unet.grouped.lora_up.weight": random(2, 12, 2, 1, 1),
    }
    assert lora_of(adapter(lora).entries[0]).groups == 3
    result = resized([(lora, 0.5), (lora, 1.0)], dtype=torch.float32)
    close(deltas(result.adapter), deltas(lora, strength=1.5))


@pytest.mark.parametrize("naming", ["diffusers", "original"])
def test_namings_meet_on_the_model(naming: Naming) -> None:
    """A fused kohya layer and its parts in diffusers names, of different scales, add up in either naming."""
    block, single = "double_blocks_0_img_attn_qkv", "single_blocks_0_linear1"
    fused = pair(f"lora_unet_{block}", 24, 8, 3, 1, alpha=1.0) | pair(f"lora_unet_{single}", 56, 8, 2, 5)
    parts: dict[str, Tensor] = {}
    for number, leaf in enumerate(("to_q", "to_k")):
        parts |= {key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): value
                  for key, value in pair(f"transformer.transformer_blocks.0.attn.{leaf}", 8, 8, 2 + number,
                      20 + number).items()}  # fmt: skip
    base = FUSED if naming == "original" else FLUX
    result = resized([(fused, 0.6), (parts, -1.2)], base, naming, dtype=torch.float32)
    expected = summed(base.changes(fused, 0.6), base.changes(parts, -1.2))
    close(base.changes(result.adapter), expected)
    ranks = {row.module.rpartition(":")[2]: row.before for row in result.rows}
    if naming == "original":
        assert ranks == {"double_blocks.0.img_attn.qkv": 3 + 2 + 3, "single_blocks.0.linear1": 2}
    else:
        assert ranks["transformer_blocks.0.attn.to_k"] == 3 + 3


def test_strengths_by_component(tmp_path: Path) -> None:
    from inweave.exchange.load import open_base
    from tests.unit.weights.models import flux, flux_lora, write_file

    index = open_base(write_file(tmp_path / "base.safetensors", flux()))
    lora = {key: value for key, value in flux_lora().items() if "dora" not in key and "lokr" not in key}
    strength = Strength(components={"unet": 0.5, "te": 0.0})
    result = resize_stack([(adapter(lora), strength)], index, lambda component: "original", dtype=torch.float32)
    assert {entry.ref.component for entry in result.adapter.entries} == {"unet"}
    base = Base(index)
    expected = {name: value for name, value in base.changes(lora, 0.5).items() if not name.startswith("text_encoders")}
    close(base.changes(result.adapter), expected)
    with pytest.raises(TargetError, match="every strength is zero"):
        resize_stack([(adapter(lora), Strength(0.0))], index, lambda component: "original")


def test_invalid_options_and_misfits_are_refused() -> None:
    lora = pair("unet.first", 20, 14, 6)
    for options in ({"rank": 0}, {"rank": -3}, {"energy": 0.0}, {"energy": 1.1}, {"energy": float("nan")}):
        with pytest.raises(ConfigError):
            resized([(lora, 1.0)], **options)
    with pytest.raises(TargetError, match="no module of this name"):
        resized([(lora, 1.0), (pair("unet.elsewhere", 20, 14, 6), 1.0)], rank=2)
    with pytest.raises(TargetError, match="lora_up is missing"):
        resized([(read(lora | {"unet.second.lora_down.weight": random(1, 2, 12)}), 1.0)], rank=2)


def test_zero_factors_survive() -> None:
    lora = pair("unet.first", 20, 14, 6) | {"unet.first.lora_up.weight": tensor([[0.0] * 6] * 20)}
    result = resized([(lora, 1.0)], rank=2)
    assert result.rows[0].rank == 1 and result.energy == 1.0


def test_chosen_rank() -> None:
    sigma = torch.tensor([3.0, 2.0, 1.0, 1e-9])
    assert chosen_rank(sigma, 14.0, None, None) == 3
    assert chosen_rank(sigma, 14.0, 2, None) == 2
    assert chosen_rank(sigma, 14.0, None, 9 / 14) == 1
    assert chosen_rank(sigma, 14.0, None, 13 / 14) == 2
    assert chosen_rank(sigma, 100.0, None, 0.9) == 3


def test_a_peft_directory_stays_one(tmp_path: Path) -> None:
    """Rank and alpha in adapter_config.json follow, and the other fields stay."""
    config = {"peft_type": "LORA", "r": 6, "lora_alpha": 3, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM",
              "fan_in_fan_out": True, "lora_bias": True, "base_model_name_or_path": "gpt2"}  # fmt: skip
    base = torch_base(
        {"h.0.attn.c_attn.weight": (12, 36), "h.0.attn.c_attn.bias": (36,), "h.1.attn.c_attn.weight": (12, 36)}
    )
    tensors: dict[str, Tensor] = {}
    for number in (0, 1):
        tensors |= {f"base_model.model.h.{number}.attn.c_attn.lora_A.weight": random(number, 6, 12),
                    f"base_model.model.h.{number}.attn.c_attn.lora_B.weight": random(number + 9, 36, 6)}  # fmt: skip
    tensors["base_model.model.h.0.attn.c_attn.lora_B.bias"] = random(30, 36)
    lora = read(tensors, {}, config)
    exact = base.changes(lora)
    result = resized([(lora, 1.0)], base, rank=5, dtype=torch.float32)
    bias = next(entry.factors for entry in result.adapter.entries if entry.param == "bias")
    assert isinstance(bias, Full) and bias.scale == 1 and bias.bias_rank == 5
    assert torch.allclose(base.changes(result.adapter)["h.0.attn.c_attn.bias"], exact["h.0.attn.c_attn.bias"])
    from tests.support import write_sparse

    shapes = {name: ("F32", shape) for name, shape in base.index.components["model"].tensors.items()}
    path = write_sparse(tmp_path / "gpt.safetensors", shapes)
    save(result.adapter, tmp_path / "out", dialect="peft", base=path)
    config_file = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config_file["r"], config_file["lora_alpha"], config_file["task_type"]) == (5, 5, "CAUSAL_LM")
    again = load(tmp_path / "out")
    best = {}
    for name in (key for key in exact if key.endswith("weight")):
        u, sigma, vh = torch.linalg.svd(exact[name], full_matrices=False)
        best[name] = (u[:, :5] * sigma[:5]) @ vh[:5]
    got = base.changes(again)
    close({name: got[name] for name in best}, best)
    assert torch.allclose(got["h.0.attn.c_attn.bias"], exact["h.0.attn.c_attn.bias"])


def test_metadata_tells_the_truth() -> None:
    metadata = {"ss_network_dim": "8", "ss_network_alpha": "4", "sshs_model_hash": "ab", "ss_tag": "kept",
                "inweave.alpha": "{}", "lora_adapter_metadata": "{}"}  # fmt: skip
    lora = read(pair("unet.first", 20, 14, 8, alpha=4.0), metadata)
    result = resized([(lora, 1.0)], rank=3).adapter
    assert result.metadata == {"ss_network_dim": "3", "ss_network_alpha": "3.0", "ss_tag": "kept"}
    assert set(resized([(lora, 1.0), (lora, 1.0)], rank=3).adapter.metadata) == set()


def test_carried_tensors_travel_unless_they_clash() -> None:
    one = read(pair("unet.first", 20, 14, 6) | {"bundle_emb.word.string_to_param.*": random(1, 2, 8)})
    two = read(pair("unet.first", 20, 14, 6, 9) | {"bundle_emb.word.string_to_param.*": random(2, 2, 8)})
    assert set(resized([(one, 1.0), (one, 1.0)], rank=2).adapter.carried) == {"bundle_emb.word.string_to_param.*"}
    listed = read(pair("unet.first", 20, 14, 6) | {"<s1>": random(1, 8)}, {"<s1>": "<embed>"})
    both = resized([(two, 1.0), (listed, 1.0)], rank=2).adapter
    assert both.metadata == {"<s1>": "<embed>"} and len(both.carried) == 2
    with pytest.raises(TargetError, match="different tensors"):
        resized([(one, 1.0), (two, 1.0)], rank=2)


def test_the_result_resolves_without_rest() -> None:
    from inweave.targets.resolve import resolve

    lora = pair("unet.first", 20, 14, 8) | conv(5) | {"unet.first.diff_b": random(8, 20)}
    plan = resolve(resized([(lora, 1.0)], rank=3).adapter, NET.index)
    assert plan.report.clean


def test_products_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair for a weight of 10^10 numbers resizes in a moment, since only its factors are touched."""
    base = torch_base({"first.weight": (100_000, 100_000), "far.weight": (2, 2)})
    lora = pair("unet.first", 100_000, 100_000, 4)
    result = resized([(lora, 1.0)], base, rank=2)
    assert result.rows[0].rank == 2
    down = decode(lora_of(result.adapter.entries[0]).down)
    assert down.shape == (2, 100_000)
