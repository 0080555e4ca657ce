"""Compiled blocks: when they pay, what they refuse, and a run whose blocks are compiled trains what an eager one does.

On the CPU the blocks go through torch's tracing of forward and backward passes, and the kernels are the eager ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from inweave.errors import ConfigError
from inweave.models.families import BUILT_IN, family_named
from inweave.training.data.batches import Order
from inweave.training.execution import compilation
from inweave.training.execution.compilation import COMPILE_SECONDS, CompiledBlocks, choose, compile_problems, saves_time
from inweave.training.loop import Run
from tests.unit.training.tiny import WIDTH, TinyTask, config, file_bits, log, make_run, state_bits

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.to_k(torch.tanh(self.to_q(x)) + text)
        return out


class Network(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, text)
        return x


def run_of(output: Path, **settings: Any) -> Run:
    settings = {
        "dropout": 0.25,
        "hidden_dropout": 0.25,
        "rank_dropout": 0.25,
        "caption_dropout": 0.5,
        "validation_split": 0.2,
        "steps": 6,
        "batch_size": 1,
        **settings,
    }
    chosen = config(output, **settings)
    task = TinyTask(chosen)
    task.networks = {"model": Network().requires_grad_(False)}
    return make_run(chosen, task=task)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run, its one network is a denoiser whose blocks can be traced here."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "DENOISER", "model")
    monkeypatch.setattr(compilation, "device_problems", lambda device: [])
    start = CompiledBlocks.start

    def without_kernels(self: CompiledBlocks) -> None:
        self._backend = "aot_eager"
        start(self)

    monkeypatch.setattr(CompiledBlocks, "start", without_kernels)


@pytest.mark.usefixtures("traced")
def test_compiled_blocks_train_what_eager_ones_do(tmp_path: Path) -> None:
    eager = run_of(tmp_path / "eager", compile="off").train()
    counters.clear()
    compiled = run_of(tmp_path / "compiled", compile="on").train()
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert dict(compiled.validation) == pytest.approx(dict(eager.validation), rel=1e-5)
    # two lengths of rows; the input of the first block needs no gradient, that of the others does
    assert counters["stats"]["unique_graphs"] == 2 * 2 and not counters["graph_break"]
    events = [record["event"] for record in log(tmp_path / "compiled") if record.get("event", "").startswith("compile")]
    assert events == ["compile"] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_are_compiled_with_options_that_torch_knows(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing decides between kernels, but not where bits have to repeat."""
    options = compilation.inductor_options(deterministic=deterministic)
    known = torch._inductor.list_options()
    assert options.keys() <= set(known) and options.get("deterministic", False) == deterministic
    assert not (deterministic and "triton.multi_kernel" in options)
    block = Network()
    blocks = CompiledBlocks({"unet": block}, deterministic=deterministic)
    blocks.blocks = [block]
    requests: list[Any] = []
    monkeypatch.setattr(block, "compile", lambda **settings: requests.append(settings["options"]))
    blocks.start()
    assert requests == [options]


@pytest.mark.usefixtures("traced")
def test_validation_and_samples_compile_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, compile="on")
    run.resume("never")
    run.train_step()
    counters.clear()
    run.validate()
    assert not counters["stats"] and run.step.blocks.active
    assert all(block._compiled_call_impl is not None for block in run.step.blocks.blocks)


@pytest.mark.usefixtures("traced")
@pytest.mark.full
def test_a_resumed_run_keeps_its_choice_and_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inweave.training.step.saves_time", lambda *_: True)
    straight = run_of(tmp_path / "straight")
    whole = straight.train()
    assert straight.step.blocks.active
    run_of(tmp_path / "twice", steps=3).train()
    monkeypatch.setattr("inweave.training.step.saves_time", lambda *_: False)
    again = run_of(tmp_path / "twice", resume="auto")
    rest = again.train()
    assert again.step.blocks.active and state_bits(again) == state_bits(straight)
    assert file_bits(rest.path) == file_bits(whole.path)
    other = run_of(tmp_path / "twice", resume="auto", steps=7, compile="off")
    other.train()
    assert not other.step.blocks.active
    assert any("were compiled and are eager now" in record.get("text", "") for record in log(tmp_path / "twice"))


@pytest.mark.usefixtures("traced")
def test_what_cannot_be_compiled_runs_eagerly_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no kernel for this")

    eager = run_of(tmp_path / "eager", compile="off").train()
    run = run_of(tmp_path / "broken", compile="on")
    run.resume("never")
    for block in run.step.blocks.blocks:
        block.compile(backend=broken)
    result = run.train()
    assert result.losses == pytest.approx(eager.losses, rel=1e-6)
    assert not run.step.blocks.active and "no kernel for this" in str(run.step.blocks.problem)
    assert [record for record in log(tmp_path / "broken") if record.get("event") == "compile failed"]


def test_what_stands_against_compiling_is_listed(tmp_path: Path) -> None:
    chosen = config(tmp_path, gradient_checkpointing="selective", shard=True)
    reasons = "; ".join(compile_problems({"unet": nn.Linear(2, 2)}, chosen, CPU))
    for word in ("device cpu", "selective", "shard", "Linear lists no repeated blocks"):
        assert word in reasons
    assert "trains none" in compile_problems({"te1": nn.Linear(2, 2)}, config(tmp_path), CPU)[0]
    with pytest.raises(ConfigError, match='compile = "on": device cpu'):
        run_of(tmp_path, compile="on")


@pytest.mark.parametrize(
    ("setting", "problems", "saves", "before", "chosen"),
    [
        ("auto", [], True, None, True), ("auto", [], False, None, False), ("auto", ["no GPU"], True, None, False),
        ("auto", [], False, True, True), ("auto", [], True, False, False), ("auto", ["no GPU"], False, True, False),
        ("off", [], True, True, False), ("on", [], False, False, True),
    ],
)  # fmt: skip
def test_auto_keeps_the_choice_of_the_run_it_resumes(
    setting: str, problems: list[str], saves: bool, before: bool | None, chosen: bool
) -> None:
    result, notes = choose(setting, problems, saves=saves, before=before)
    assert result == chosen and bool(notes) == (before is not None and before != chosen)
    assert all(problem in notes[0] for problem in problems if notes)


def test_compiling_pays_in_long_runs_of_large_images(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(family=SimpleNamespace(compile_saving=0.01), size=1024)
    one, two = Order((1,), (4,), 1), Order((1, 2), (4, 4), 1)
    enough = int(COMPILE_SECONDS / 0.01) + 1
    usual = config(tmp_path, batch_size=1)
    assert saves_time(model, one, usual, enough) and not saves_time(model, one, usual, enough - 2)
    assert not saves_time(model, two, usual, enough) and saves_time(model, two, usual, 2 * enough)
    assert not saves_time(model, one, usual.model_copy(update={"resolution": 512}), 3 * enough)
    assert saves_time(model, one, usual.model_copy(update={"batch_size": 4}), enough // 3)
    assert not saves_time(SimpleNamespace(), one, usual, 10**6), "a language model"


def test_compiling_pays_for_families_that_were_measured(tmp_path: Path) -> None:
    usual, one = config(tmp_path, batch_size=1), Order((1,), (4,), 1)
    pays = {family.name: saves_time(SimpleNamespace(family=family, size=1024), one, usual, 2500) for family in BUILT_IN}
    assert {name for name, long_enough in pays.items() if long_enough} == {"flux", "sd3"}
    flux: Any = SimpleNamespace(family=family_named("flux"), size=1024)
    assert saves_time(flux, one, usual, 500) and not saves_time(flux, one, usual, 400)


def test_blocks_of_a_subclass_are_repeated_blocks_too() -> None:
    class FusedBlock(Block):
        pass

    network = Network()
    count = len(compilation.repeated_blocks(network))
    for module in compilation.repeated_blocks(network):
        module.__class__ = FusedBlock
    assert len(compilation.repeated_blocks(network)) == count > 0
