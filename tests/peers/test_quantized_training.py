"""Training with a base in 8 bits: which runs may have it, what it changes, and that files and checkpoints know.

The CPU multiplies what a GPU would, in float32; only tests let it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.models.model import file_index
from inweave.models.quantization import quantize_denoiser
from inweave.models.roles import token_layers
from inweave.ops.quantized import FORMATS, QuantizedLayer, fp8
from inweave.ops.quantized.fp8 import Fp8Linear
from inweave.training.checkpoint.resume import ensure_resumable
from inweave.training.config.schema import TrainConfig
from inweave.training.loop import Run
from inweave.training.memory.quantize_setting import quantize_problems
from inweave.training.session import check, prepare, train
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, task_on

CPU = torch.device("cpu")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU and the narrow layers of tiny models will do."""
    monkeypatch.setattr(Fp8Linear, "device_problems", lambda device: [])
    monkeypatch.setattr(fp8, "SMALLEST_SIDE", 16)


def trained(folder: Path, *, quantize: str) -> tuple[Run, Any]:
    data, model = make_set(folder / "set"), fresh_model("flux1-dev")
    settings: dict[str, Any] = {
        "targets": "attention-mlp",
        "steps": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0,
        "output": str(folder / "out"),
    }
    task = task_on(data, model=model, quantize=quantize, **settings)
    task.prepare()
    same = sample_inputs(task)
    task.sample_batch = lambda batch, generators: same  # type: ignore[method-assign]
    run = Run(task, model, file_index(model), task.config)
    if quantize != "off":
        assert "are multiplied in 8 bits" in quantize_denoiser(model, "fp8", CPU)
    return run, run.train()


@pytest.mark.usefixtures("allowed")
def test_a_quantized_base_trains_nearly_what_the_original_does(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain", quantize="off")
    run, quantized = trained(tmp_path / "fp8", quantize="fp8")
    denoiser = run.model.denoiser
    bases = [layer.base for layer in lora_layers(denoiser).values()]
    assert bases and all(isinstance(base, Fp8Linear) for base in bases)
    assert not any(isinstance(module, Fp8Linear) for module in denoiser.x_embedder.modules()), (
        "only what sees every token"
    )
    assert all(
        p.dtype == torch.float32 for layer in lora_layers(denoiser).values() for p in layer.adapters.parameters()
    )
    assert quantized.losses == pytest.approx(plain.losses, rel=0.05) and quantized.losses != plain.losses
    assert quantized.losses[-1] < quantized.losses[0]
    one, two = load_file(plain.path), load_file(quantized.path)
    assert one.keys() == two.keys() and all(one[key].shape == two[key].shape for key in one)
    with safe_open(quantized.path, "pt") as opened:
        assert 'quantize = "fp8"' in opened.metadata()["inweave.config"]


def test_a_run_is_refused_with_every_reason(tmp_path: Path) -> None:
    with torch.device("meta"):
        small, large = (
            torch.nn.ModuleDict({"to_q": torch.nn.Linear(64, 64)}),
            torch.nn.ModuleDict({"to_q": torch.nn.Linear(3072, 3072)}),
        )
    config = TrainConfig.of(dataset="-", quantize="fp8", precision="fp32")
    reasons = "; ".join(quantize_problems(small, config, CPU))
    for word in ("device cpu", 'set precision = "bf16"', "large enough"):
        assert word in reasons
    assert len(quantize_problems(large, config.model_copy(update={"precision": "bf16"}), CPU)) == 1
    assert quantize_problems(small, TrainConfig.of(dataset="-"), CPU) == []
    dora = config.model_copy(update={"precision": "bf16", "network": "dora"})
    assert any("norms of the original weights" in problem for problem in quantize_problems(large, dora, CPU))


def test_a_resumed_run_keeps_it() -> None:
    before = TrainConfig.of(dataset="-", steps=5, quantize="fp8")
    now = TrainConfig.of(dataset="-", steps=5)
    facts = [{"config": each.model_dump(mode="json"), "data": "", "base": ""} for each in (before, now)]
    with pytest.raises(ConfigError, match="quantize: this run was started with 'fp8', now it is 'off'"):
        ensure_resumable(facts[0], facts[1], now, 3)


def session_config(folder: Path) -> TrainConfig:
    """One image and one step on the bundled model."""
    make_set(folder / "set", {"one": "a cat"})
    return TrainConfig.of(
        dataset=str(folder / "set"), output=str(folder / "out"), cache_dir=str(folder / "cache"), device="cpu", steps=1,
        resolution=64, precision="bf16", quantize="fp8", targets="attention",
    )  # fmt: skip


def test_a_device_without_such_products_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = session_config(tmp_path)
    for refuse in (prepare, train):
        with pytest.raises(ConfigError, match='quantize = "fp8": device cpu: 8-bit products need an NVIDIA GPU'):
            refuse(config)
    assert any("8-bit products" in problem for problem in check(config)[2]["problems"])
    assert not (tmp_path / "out").exists()


def storing(folder: Path, format: str) -> TrainConfig:
    settings = {"quantize": format, "targets": "attention-mlp", "gradient_checkpointing": "full"}
    return session_config(folder).model_copy(update=settings)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plan of such a run with weights in 16 bits."""
    _, _, needs = check(storing(tmp_path_factory.mktemp("plain"), "off"))
    return needs


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["int8", "int8-hadamard", "nf4"])
def test_a_format_that_only_stores_trains_on_any_device(format: str, plain: dict[str, Any], tmp_path: Path) -> None:
    """The bundled model, checkpointed; its weights take the bytes that the plan predicts, and fewer than in 16 bits."""
    config = storing(tmp_path, format)
    _, _, needs = check(config)
    assert needs["problems"] == []
    records: list[Any] = []
    run, sample = prepare(config)
    names = {name.rpartition(".")[2] for name in run.base}
    assert "weight" in names and not names & {"numbers", "scales"}, "the base is known by the weights of its file"
    quantized: list[Any] = [layer for layer in run.model.denoiser.modules() if isinstance(layer, QuantizedLayer)]
    quantized += [layer.base for layer in lora_layers(run.model.denoiser).values()]
    quantized = [layer for layer in quantized if isinstance(layer, QuantizedLayer)]
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in quantized), "convolutions too"
    assert quantized and not any("weight" in layer._parameters for layer in quantized)
    result = run.train(sample=sample, on_record=records.append)
    (text,) = [record["text"] for record in records if record.get("event") == "quantize"]
    assert f"are stored in {format}" in text and "differ by" in text
    assert all(loss == loss for loss in result.losses) and result.skipped_steps == 0
    trained = {id(p) for layer in lora_layers(run.model.denoiser).values() for p in layer.adapters.parameters()}
    own = sum(t.nbytes for network in run.model.networks.values() for t in network.parameters() if id(t) not in trained)
    own += sum(t.nbytes for layer in set(quantized) for t in layer.quantized)
    assert own == needs["weights_bytes"] < plain["weights_bytes"]
    shrunk = sum(math.prod(layer.shape) for layer in set(quantized))
    saved = (2 - FORMATS[format].bytes_per_parameter) * shrunk
    assert plain["weights_bytes"] - needs["weights_bytes"] == pytest.approx(saved, rel=0.05)


@pytest.mark.usefixtures("allowed")
def test_a_session_quantizes_what_it_loads_and_says_so(tmp_path: Path) -> None:
    records: list[Any] = []
    run, sample = prepare(session_config(tmp_path))
    result = run.train(sample=sample, on_record=records.append)
    (text,) = [record["text"] for record in records if record.get("event") == "quantize"]
    count = sum(isinstance(layer, Fp8Linear) for layer in token_layers(run.model.denoiser).values())
    assert text.startswith(f"{count} of the {count} linear layers") and count == 70
    assert all(loss == loss for loss in result.losses) and result.skipped_steps == 0
