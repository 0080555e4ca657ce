"""Extraction: what was added comes back, and the report states how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inweave.adapter import Adapter, Full, Lora
from inweave.errors import ConfigError, TargetError
from inweave.exchange.convert import naming_for, save
from inweave.exchange.load import component_folders, load, open_base
from inweave.ops.tensors.decode import decode
from inweave.targets.resolve import resolve
from inweave.weights.offline.bake import BakeItem, write_merged
from inweave.weights.offline.extract import Extracted, extract_difference, open_checkpoint, truncated_svd
from inweave.weights.stack import Strength
from tests.unit.weights.models import DENOISER, ENCODER, flux, write_file, write_folder, write_shards

NET = {
    "layer.weight": (60, 50), "layer.bias": (60,), "conv.weight": (24, 10, 3, 3), "point.weight": (12, 24, 1, 1),
    "norm.weight": (50,), "norm.bias": (50,), "tokens.wte.weight": (30, 8), "same.weight": (9, 9), "table": (4, 6),
}  # fmt: skip


def net(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in NET.items()}


def change(seed: int, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """A change of exactly this rank once flattened."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.Size(shape[1:]).numel()
    return (torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, columns, generator=generator)).reshape(
        shape
    )


def extracted(tuned: Path, base: Path, to: str = "peft", **options) -> Extracted:  # type: ignore[no-untyped-def]
    index = open_base(base)
    with ExitStack() as opened:
        return extract_difference(
            open_checkpoint(tuned, open_base(tuned), component_folders(tuned), opened),
            open_checkpoint(base, index, component_folders(base), opened),
            lambda component: naming_for(to, component, index),
            **options,
        )


def two(folder: Path, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> tuple[Path, Path]:
    return write_file(folder / "tuned.safetensors", after), write_file(folder / "base.safetensors", before)


def products(adapter: Adapter) -> dict[str, torch.Tensor]:
    """module -> up @ down, in float64 and by nothing of inweave's formulas."""
    deltas = {}
    for entry in adapter.entries:
        assert isinstance(entry.factors, Lora) and entry.factors.alpha == entry.factors.rank
        up, down = (decode(t, dtype=torch.float64).flatten(1) for t in (entry.factors.up, entry.factors.down))
        deltas[entry.ref.name] = (up @ down).reshape(entry.factors.shape())
    return deltas


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert torch.linalg.vector_norm(actual - expected) <= tolerance * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_an_exact_low_rank_change_comes_back(tmp_path: Path, rank: int) -> None:
    before = net()
    changed = {name: change(3, NET[name], rank) for name in ("layer.weight", "conv.weight", "point.weight")}
    tuned, base = two(tmp_path, before, before | {name: before[name] + value for name, value in changed.items()})
    result = extracted(tuned, base, rank=rank, dtype=torch.float32)
    restored = products(result.adapter)
    assert restored.keys() == {"layer", "conv", "point"}
    for name, value in changed.items():
        close(restored[name.removesuffix(".weight")], value.double(), 1e-4)
    assert result.energy == pytest.approx(1, abs=1e-6)
    assert all(row.energy == pytest.approx(1, abs=1e-6) and row.rank == rank for row in result.rows)
    assert not result.left_out and not result.notes
    conv = next(entry.factors for entry in result.adapter.entries if entry.ref.name == "conv")
    assert isinstance(conv, Lora)
    assert conv.down.shape == (rank, 10, 3, 3) and conv.up.shape == (24, rank, 1, 1)


@pytest.mark.parametrize("shape", [(700, 640), (300, 260), (64, 40, 3, 3)])
def test_the_energy_of_a_full_rank_change_is_that_of_the_exact_svd(shape: tuple[int, ...]) -> None:
    """A flat spectrum is the hardest case; the first shape takes the randomized SVD, the others the exact one."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).flatten(1)
    rank = 12
    _, sigma, _ = truncated_svd(matrix, rank, 5)
    exact = torch.linalg.svdvals(matrix.double())[:rank].square().sum()
    assert float(sigma[:rank].double().square().sum()) == pytest.approx(float(exact), rel=0.02)


def test_the_report_has_the_energy_a_rank_preserves(tmp_path: Path) -> None:
    before, difference = net(), torch.randn(60, 50, generator=torch.Generator().manual_seed(9))
    tuned, base = two(tmp_path, before, before | {"layer.weight": before["layer.weight"] + difference})
    result = extracted(tuned, base, rank=8, dtype=torch.float32)
    squares = torch.linalg.svdvals(difference.double()).square()
    energy = float(squares[:8].sum() / squares.sum())
    assert result.energy == pytest.approx(energy, rel=1e-4)
    assert result.rows[0].norm == pytest.approx(float(squares.sum()), rel=1e-4)
    lost = products(result.adapter)["layer"] - difference.double()
    assert float(lost.square().sum() / squares.sum()) == pytest.approx(1 - energy, rel=1e-4)
    assert "higher rank" in result.notes[0]


def test_energy_takes_the_lowest_rank_that_reaches_it(tmp_path: Path) -> None:
    before, difference = net(), change(4, (60, 50), 20)
    tuned, base = two(tmp_path, before, before | {"layer.weight": before["layer.weight"] + difference})
    squares = torch.linalg.svdvals(difference.double()).square()
    shares = torch.cumsum(squares, 0) / squares.sum()
    for energy in (0.3, 0.9, 0.99):
        row = extracted(tuned, base, rank=32, energy=energy).rows[0]
        assert row.rank == int((shares < energy).sum()) + 1
        assert row.energy >= energy - 1e-6
    assert extracted(tuned, base, rank=5, energy=0.999).rows[0].rank == 5
    with pytest.raises(ConfigError, match="energy"):
        extracted(tuned, base, energy=1.5)
    with pytest.raises(ConfigError, match="rank"):
        extracted(tuned, base, rank=0)


def test_the_rank_is_clipped_to_the_layer(tmp_path: Path) -> None:
    before = net()
    tuned, base = two(tmp_path, before, before | {"point.weight": net(1)["point.weight"]})
    result = extracted(tuned, base, rank=500)
    assert [row.rank for row in result.rows] == [12]
    assert result.energy == pytest.approx(1, abs=1e-6)


def test_norms_biases_and_tables(tmp_path: Path) -> None:
    before, after = net(), net(1) | {"same.weight": net()["same.weight"]}
    tuned, base = two(tmp_path, before, after)
    plain = extracted(tuned, base, rank=4)
    assert {row.module.removeprefix("model:") for row in plain.left_out} == {
        "layer.bias", "norm.weight", "norm.bias", "tokens.wte.weight", "table",
    }  # fmt: skip
    total = sum(float((after[name].double() - before[name].double()).square().sum()) for name in NET)
    energy = sum(row.energy * row.norm for row in plain.rows)
    assert plain.energy == pytest.approx(energy / total, rel=1e-6)  # what is left out counts as lost
    full = extracted(tuned, base, rank=4, full_norms=True, dtype=torch.float32)
    whole = {f"{e.ref.name}.{e.param}": e.factors for e in full.adapter.entries if isinstance(e.factors, Full)}
    assert whole.keys() == {"layer.bias", "norm.weight", "norm.bias"}
    assert [whole[name].norm for name in ("layer.bias", "norm.weight", "norm.bias")] == [False, True, True]
    for name, factors in whole.items():
        assert torch.equal(decode(factors.value), after[name] - before[name])


def test_only_what_differs_beyond_rounding(tmp_path: Path) -> None:
    """A tuned file in another dtype differs everywhere by rounding, which should not be extracted."""
    before = net()
    after = before | {"layer.weight": before["layer.weight"] + change(2, (60, 50), 2)}
    for dtype in (torch.float16, torch.bfloat16):
        tuned, base = two(tmp_path, before, {name: value.to(dtype) for name, value in after.items()})
        assert [row.module for row in extracted(tuned, base).rows] == ["model:layer.weight"]
        tuned, base = two(tmp_path, {name: value.to(dtype) for name, value in before.items()}, before)
        with pytest.raises(TargetError, match="do not differ"):
            extracted(tuned, base)


def test_the_same_numbers_every_time(tmp_path: Path) -> None:
    before = {"big.weight": torch.randn(400, 400), "other.weight": torch.randn(3, 3)}
    tuned, base = two(tmp_path, before, before | {"big.weight": torch.randn(400, 400)})
    torch.manual_seed(1)
    one = extracted(tuned, base, rank=4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two_ = extracted(tuned, base, rank=4)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is untouched
    assert all(t.same(two_.adapter.tensors[key]) for key, t in one.adapter.tensors.items())


def tuned_flux(seed: int = 7) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    before = flux()
    names = [f"{DENOISER}double_blocks.0.img_attn.qkv.weight", f"{DENOISER}single_blocks.0.linear1.weight",
             f"{DENOISER}final_layer.adaLN_modulation.1.weight",
             f"{ENCODER}text_model.encoder.layers.0.self_attn.q_proj.weight"]  # fmt: skip
    after = before | {name: before[name] + change(seed, tuple(before[name].shape), 2) for name in names}
    return before, after


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
@pytest.mark.parametrize("layouts", ["file-folder", "folder-file", "shards-file", "folder-folder"])
def test_any_two_layouts_of_one_model_compare(tmp_path: Path, to: str, layouts: str) -> None:
    """Saved, loaded and baked into the base again, the extracted adapter gives the tuned model."""
    before, after = tuned_flux()
    make = {
        "file": lambda name, tensors: write_file(tmp_path / f"{name}.safetensors", tensors),
        "folder": lambda name, tensors: write_folder(tmp_path / name, tensors),
        "shards": lambda name, tensors: write_shards(tmp_path / name, tensors),
    }
    left, right = layouts.split("-")
    tuned, base = make[left]("tuned", after), make[right]("base", before)
    result = extracted(tuned, base, to, rank=2 if to == "kohya" else 8, dtype=torch.float32)
    assert result.energy == pytest.approx(1, abs=1e-5)
    saved = save(result.adapter, tmp_path / "lora.safetensors", dialect=to, base=base)
    adapter = load(saved.path)
    assert to in adapter.dialects[0]
    if to == "kohya":  # one pair for a fused layer, as kohya trains them
        assert len(adapter) == 4
        assert {entry.factors.rank for entry in adapter.entries} == {2}
    plain = write_file(tmp_path / "again.safetensors", before)
    index = open_base(plain)
    write_merged(plain, [BakeItem(resolve(adapter, index), Strength())], tmp_path / "out.safetensors", index=index)
    restored = load_file(tmp_path / "out.safetensors")
    for name, value in after.items():
        if not torch.equal(value, before[name]):
            close((restored[name] - before[name]).double(), (value - before[name]).double(), 1e-4)
        else:
            assert torch.equal(restored[name], value)


def test_one_network_against_a_whole_checkpoint(tmp_path: Path) -> None:
    before, after = tuned_flux()
    base = write_file(tmp_path / "base.safetensors", before)
    part = {name.removeprefix(DENOISER): value for name, value in after.items() if name.startswith(DENOISER)}
    one = write_file(tmp_path / "unet.safetensors", part)
    for tuned, other in ((one, base), (base, one)):
        result = extracted(tuned, other, "kohya")
        assert len(result.rows) == 3
        assert f"te1 is only in {base}; it was not compared" in result.notes


def test_different_models_are_refused_and_both_named(tmp_path: Path) -> None:
    before, after = tuned_flux()
    name = f"{DENOISER}double_blocks.0.img_attn.qkv.weight"
    tuned, base = two(tmp_path, before, after | {name: torch.randn(24, 16)})
    with pytest.raises(
        TargetError, match=r"tuned\.safetensors .* and .*base\.safetensors .* are different models: .*to_q"
    ):
        extracted(tuned, base)
    fewer = {key: value for key, value in after.items() if "guidance_in" not in key}
    tuned, base = two(tmp_path, before, fewer)
    with pytest.raises(TargetError, match=r"different models: 4 tensors of the unet .*guidance_embedder"):
        extracted(tuned, base)
    encoder = {key.removeprefix(ENCODER): value for key, value in after.items() if key.startswith(ENCODER)}
    only = {key: value for key, value in before.items() if key.startswith(DENOISER)}
    with pytest.raises(TargetError, match="no network is in both"):
        extracted(write_file(tmp_path / "te.safetensors", encoder), write_file(tmp_path / "dn.safetensors", only))


def test_nan_is_named(tmp_path: Path) -> None:
    before = net()
    tuned, base = two(tmp_path, before, before | {"layer.weight": torch.full((60, 50), float("nan"))})
    with pytest.raises(TargetError, match=r"layer\.weight: one of the checkpoints contains NaN"):
        extracted(tuned, base)
