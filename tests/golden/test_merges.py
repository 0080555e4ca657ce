"""Every golden file: inweave merges it into the same weights as the trainers' own libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from inweave.adapter import Adapter
from inweave.formats.files import open_container
from inweave.formats.read import read
from inweave.ops.delta import change
from inweave.ops.tensors.decode import decode
from inweave.targets.index import index_from_names
from inweave.targets.resolve import resolve
from tests.support import DATA

FILES = sorted((DATA / "golden").glob("*.safetensors"))


def open_golden(path: Path) -> tuple[Adapter, dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The adapter, the base weights and the expected weights by strength."""
    container = open_container(path)
    base: dict[str, torch.Tensor] = {}
    expected: dict[str, dict[str, torch.Tensor]] = {}
    adapter = {}
    for name, tensor in container.tensors.items():
        if name.startswith("base."):
            base[name.removeprefix("base.")] = decode(tensor)
        elif name.startswith("expected_"):
            strength, _, rest = name.removeprefix("expected_").partition(".")
            strength, rest = f"{strength}.{rest[0]}", rest[2:]
            expected.setdefault(strength, {})[rest] = decode(tensor)
        else:
            adapter[name] = tensor
    config = json.loads(container.metadata["adapter_config"]) if "adapter_config" in container.metadata else None
    arguments = json.loads(container.metadata.get("kwargs", "{}"))
    metadata = {"ss_network_args": json.dumps({"rs_lora": arguments["rs_lora"]})} if "rs_lora" in arguments else {}
    if config is None:  # one layer, which the file calls `test`
        base = {f"test.{name}": weight for name, weight in base.items()}
        expected = {s: {f"test.{name}": weight for name, weight in rows.items()} for s, rows in expected.items()}
    return read(adapter, metadata, config), base, expected


def merged(adapter: Adapter, base: dict[str, torch.Tensor], strength: float) -> dict[str, torch.Tensor]:
    index = index_from_names({name: tuple(weight.shape) for name, weight in base.items()})
    plan = resolve(adapter, index)
    result = dict(base)
    for placement in plan.placements:
        result[placement.tensor] = base[placement.tensor] + change(placement.factors, base[placement.tensor], strength)
    return result


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_strength_one(path: Path) -> None:
    adapter, base, expected = open_golden(path)
    result = merged(adapter, base, 1.0)
    changed = 0
    for name, want in expected["1.0"].items():
        error = (result[name] - want).abs().max() / want.abs().max()
        assert error < 1e-5, f"{name}: {error:.2e}"
        changed += int(not torch.equal(want, base[name]))
    assert changed, "a golden file that changes nothing proves nothing"


def test_strength_one_half() -> None:
    """If the file has expected values for it; DoRA is tested below."""
    compared = 0
    for path in FILES:
        adapter, base, expected = open_golden(path)
        if "0.5" not in expected or "dora" in path.stem or "doha" in path.stem:
            continue
        result = merged(adapter, base, 0.5)
        for name, want in expected["0.5"].items():
            error = (result[name] - want).abs().max() / want.abs().max()
            assert error < 1e-5, f"{path.stem}, {name}: {error:.2e}"
        compared += 1
    assert compared == 23


@pytest.mark.parametrize("path", [p for p in FILES if "dora" in p.stem or "doha" in p.stem], ids=lambda p: p.stem)
def test_dora_interpolates_between_the_base_and_the_whole(path: Path) -> None:
    """Half strength is half the change; LyCORIS' own reading does not return the base at strength 0."""
    adapter, base, expected = open_golden(path)
    half, whole = merged(adapter, base, 0.5), merged(adapter, base, 1.0)
    for name in expected["1.0"]:
        torch.testing.assert_close(half[name], (base[name] + whole[name]) / 2, rtol=1e-5, atol=1e-6)


def test_there_are_golden_files() -> None:
    assert len(FILES) == 41
