"""An algorithm and a dialect of another package, installed with entry points: read, checked, merged, trained, written.

The package is `tests/data/outside_algorithm`, with the dist-info folder that pip would write. Every test runs it in a
process of its own, because entry points are loaded once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("torch")

from tests.forked import run_forked

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "data" / "outside_algorithm"
COMMAND = "from inweave.cli.app import main; main()"
PROGRAM = """
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import inweave
from inweave.layers import model_index

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
save_file({name: value.detach() for name, value in model.state_dict().items()}, "base.safetensors")
base = model[0].weight.detach().clone()
given = load_file("given.safetensors")
column, row = given["outer_net.0.outer_column.weight"], given["outer_net.0.outer_row.weight"]

adapter = inweave.load("given.safetensors")
assert adapter.algorithms == ("outer",) and adapter.dialects == ("dashed",), adapter
assert not adapter.problems and adapter.entries[0].factors.scale == 0.5
assert inweave.check("given.safetensors", base="base.safetensors").ok

weaver = inweave.Weaver(model)
weaver.apply([(adapter, 2.0)])
assert torch.equal(model[0].weight, base + 2.0 * (0.5 * (column @ row)))
weaver.apply([])
assert torch.equal(model[0].weight, base)

inweave.attach(model, adapter)
x = torch.randn(5, 6)
expected = nn.functional.linear(x, base + 0.5 * column @ row, model[0].bias)
torch.testing.assert_close(model[0](x), expected)
inweave.eject(model)

inweave.inject(model, 1, 1.0, ["0"], network="outer")
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
before = model(x).detach()
(model(x) - torch.randn(5, 3)).square().mean().backward()
optimizer.step()
assert not torch.equal(model(x), before)
index = model_index(model)
trained = inweave.collect(model)
inweave.save(trained, "trained.safetensors", dialect="dashed", base=index)
again = inweave.load("trained.safetensors")
assert set(load_file("trained.safetensors")) == set(given)
assert again.entries[0].factors.column.same(trained.entries[0].factors.column)
assert again.entries[0].factors.row.same(trained.entries[0].factors.row)
merged = model(x).detach()
inweave.eject(model)
inweave.attach(model, again)
torch.testing.assert_close(model(x), merged)
print("all of it works")
"""


def run(arguments: list[str], folder: Path, *packages: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with other packages installed."""
    if packages == (PACKAGE,):
        program, rest = (arguments[1], arguments[2:]) if arguments[0] == "-c" else (COMMAND, arguments[2:])
        return run_forked(program, *rest, folder=folder, packages=packages)
    path = os.pathsep.join(map(str, (*packages, ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Write an adapter in the outside dialect, and the base that it is for."""
    names = ("outer_net.0.outer_column.weight", "outer_net.0.outer_row.weight", "outer_net.0.alpha")
    numbers = np.random.default_rng(0).standard_normal(14).astype(np.float32)
    values = (numbers[:8].reshape(8, 1), numbers[8:].reshape(1, 6), np.array(0.5, np.float32))
    save_file(dict(zip(names, values, strict=True)), tmp_path / "given.safetensors")
    shapes = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "base.safetensors")


def test_an_algorithm_and_a_dialect_of_another_package(tmp_path: Path) -> None:
    result = run(["-c", PROGRAM], tmp_path, PACKAGE)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all of it works\n"


def test_training_takes_the_algorithm_as_its_network(tmp_path: Path) -> None:
    settings = {"dataset": "inweave/pixel", "network": "outer", "rank": 1, "steps": 1, "warmup": 0, "targets": ["to_q"]}
    training = (
        f"import inweave; config = inweave.TrainConfig(**{settings})\n"
        "adapter = inweave.load(inweave.train(config).path)\n"
        "assert adapter.algorithms == ('outer',) and adapter.entries, adapter\n"
    )
    result = run(["-c", training], tmp_path, PACKAGE)
    assert result.returncode == 0, result.stderr
    refused = run(["-c", training.replace("'outer', 'rank'", "'outre', 'rank'")], tmp_path, PACKAGE)
    assert "network: should be 'lora', 'locon', 'dora', 'loha', 'lokr' or 'outer', got 'outre'" in refused.stderr


def test_the_command_line_knows_them(tmp_path: Path) -> None:
    inspected = run(["-m", "inweave", "inspect", "given.safetensors"], tmp_path, PACKAGE)
    assert inspected.returncode == 0 and "dashed" in inspected.stdout and "algorithm  outer" in inspected.stdout
    arguments = ["-m", "inweave", "convert", "given.safetensors", "again.safetensors", "--to", "dashed"]
    converted = run([*arguments, "--base", "base.safetensors"], tmp_path, PACKAGE)
    assert converted.returncode == 0, converted.stdout + converted.stderr
    refused = run(
        ["-m", "inweave", "convert", "given.safetensors", "x.safetensors", "--to", "morse"], tmp_path, PACKAGE
    )
    assert refused.returncode == 2 and "dashed" in refused.stdout + refused.stderr
    without = run(["-m", "inweave", "inspect", "given.safetensors"], tmp_path)
    assert "outer" not in without.stdout.split("algorithm")[-1].split("\n")[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('no such library')", "OSError: no such library"),
        ("Broken = 3", "3 is not an algorithm"),
        (
            "from inweave.adapter import Factors\nclass Broken(Factors):\n    kind = 'lora'",
            "algorithm 'lora': Lora has this name already",
        ),
    ],
)
def test_a_broken_plugin_is_reported_by_name(tmp_path: Path, source: str, reason: str) -> None:
    site = tmp_path / "site"
    info = site / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "broken.py").write_text(source, "utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[inweave.algorithms]\nbroken = broken:Broken\n", "utf-8")
    result = run(["-m", "inweave", "inspect", "given.safetensors"], tmp_path, site)
    text = " ".join((result.stdout + result.stderr).split())
    assert result.returncode != 0 and "plugin 'broken' (inweave.algorithms)" in text and reason in text
    assert "Traceback" not in text


def test_a_file_of_the_built_in_dialects_looks_for_no_plugins(tmp_path: Path) -> None:
    file = ROOT / "tests" / "data" / "files" / "cloneofsimo_lora_disney.safetensors"
    program = f"import sys, inweave; inweave.load({str(file)!r}); assert 'importlib.metadata' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, ROOT / "src")))}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
