"""Training with the base in host memory: the same bits as with it on the device, in every kind of run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from safetensors.torch import load_file

from inweave.errors import ConfigError
from inweave.models import quantized_cache
from inweave.models.quantization import Quantizer
from inweave.ops.quantized.dequantizing import DequantizingLinear
from inweave.training.config.schema import TrainConfig
from inweave.training.execution.compilation import compile_problems
from inweave.training.loop import Run
from inweave.training.session import prepare
from inweave.training.tasks.arrivals import usable
from inweave.weights.streaming import activations
from inweave.weights.streaming.copies import HostCopies
from inweave.weights.streaming.stream import BlockStream
from tests.peers import tiny_models as tiny
from tests.unit.training.image_sets import make_set


def settings(folder: Path, variant: str, **more: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model": str(tiny.folder(variant)) if variant else "", "dataset": str(make_set(folder / "set")),
        "output": str(folder / "out"),
        "cache_dir": str(folder / "cache"), "name": "t", "steps": 2, "batch_size": 2, "rank": 2, "resolution": 64,
        "min_bucket": 32, "bucket_step": 32, "save_dtype": "fp32", "log_every": 1, "precision": "fp32",
        "learning_rate": 1e-2, "targets": "attention-mlp", "device": "cpu",
    }  # fmt: skip
    return TrainConfig.of(**{**usual, **more})


def outcome(config: TrainConfig, *, poison: bool = False) -> tuple[list[float], dict[str, bytes], Run, list[Any]]:
    with tiny.quick_tokenizers():
        run, sample = prepare(config)
    task: Any = run.task
    stream: Any = task.stream
    order: list[Any] = []
    blocks = run.model.family.blocks(run.model.denoiser)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: order.append(number))
    if poison:  # nothing of the base may be read but what was copied for it
        for slot in stream._ring._slots:
            slot.fill_(255)
    records: list[Any] = []
    result = run.train(sample=sample, on_record=records.append)
    assert order[: len(blocks)] == list(range(len(blocks))), "they run in the order in which they are copied"
    tensors = load_file(result.path)
    losses = [*result.losses, *(loss for _, loss in result.validation)]
    return losses, {name: t.numpy().tobytes() for name, t in tensors.items()}, run, records


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrow layers of tiny models are quantized too."""
    monkeypatch.setattr(DequantizingLinear, "SMALLEST_SIDE", 8)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("sdxl", {"gradient_checkpointing": "off", "network": "dora"}),
        ("sdxl", {"gradient_checkpointing": "full", "quantize": "int8-hadamard"}),
        ("flux1-dev", {"gradient_checkpointing": "selective", "gradient_accumulation": 2}),
        ("flux1-dev", {"gradient_checkpointing": "full", "quantize": "int8"}),
        ("sd1.5", {"gradient_checkpointing": "full", "train_text_encoders": True, "cache_text": False}),
        ("z-image-turbo", {"gradient_checkpointing": "full"}),
        ("qwen-image", {"gradient_checkpointing": "off", "optimizer": "adamw8bit"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_a_streamed_run_has_the_bits_of_a_resident_one(variant: str, more: dict[str, Any], tmp_path: Path) -> None:
    resident = outcome(settings(tmp_path / "resident", variant, offload="off", **more))
    streamed = outcome(settings(tmp_path / "streamed", variant, offload="blocks", **more), poison=True)
    tasks: list[Any] = [each[2].task for each in (resident, streamed)]
    assert streamed[:2] == resident[:2] and tasks[0].stream is None
    stream = tasks[1].stream
    assert isinstance(stream, BlockStream) and stream.copied_bytes >= 2 * stream.streamed_bytes
    assert any("blocks" in str(record.get("text")) and "in host memory" in record["text"] for record in streamed[3])


def test_samples_validation_and_a_resumed_run(tmp_path: Path) -> None:
    """All of it in one run: what is generated and validated between two steps leaves no trace in them."""
    more = {
        "model": "inweave/emoji", "targets": "attention",
        "validation_split": 0.5, "validate_every": 1, "steps": 2, "gradient_checkpointing": "full",
        "sample_every": 1, "sample_prompts": ["a cat"], "sample_steps": 1, "dropout": 0.1,
    }  # fmt: skip
    resident = outcome(settings(tmp_path / "resident", "", **more))
    straight = outcome(settings(tmp_path / "straight", "", offload="blocks", **more))
    assert straight[:2] == resident[:2] and not [r for r in straight[3] if r.get("event") == "sample failed"]
    images = [sorted((tmp_path / each / "out").rglob("*.png")) for each in ("resident", "straight")]
    assert len(images[0]) == len(images[1]) == 2
    assert [path.read_bytes()[-5000:] for path in images[0]] == [path.read_bytes()[-5000:] for path in images[1]]
    outcome(settings(tmp_path / "twice", "", offload="blocks", **{**more, "steps": 1}))
    rest = outcome(settings(tmp_path / "twice", "", offload="off", resume="auto", **more))
    assert rest[1] == resident[1], "not a setting that a resumed run must keep"


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("sdxl", {"gradient_checkpointing": "full", "gradient_accumulation": 2}),
        ("flux1-dev", {"gradient_checkpointing": "full", "offload": "blocks"}),
        ("flux1-dev", {"gradient_checkpointing": "selective", "quantize": "int8"}),
        ("qwen-image", {"gradient_checkpointing": "full", "validation_split": 0.5, "validate_every": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_inputs_of_blocks_in_host_memory_change_no_bit(
    variant: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST", 1 << 12)
    made: list[activations.HostActivations] = []
    make = activations.HostActivations.__init__

    def remember(self: activations.HostActivations, *arguments: Any, **options: Any) -> None:
        made.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(activations.HostActivations, "__init__", remember)
    there = outcome(settings(tmp_path / "there", variant, **more))
    assert not made
    moved = outcome(settings(tmp_path / "moved", variant, offload_activations="on", **more))
    assert moved[:2] == there[:2] and any("inputs of checkpointed blocks" in str(each.get("text")) for each in moved[3])
    assert len(made) == 1 and made[0].host_bytes > 1 << 14
    assert sum(len(each) * size for size, each in made[0]._free.items()) == made[0].host_bytes, "all is given back"


def test_split_batches(tmp_path: Path) -> None:
    split = [settings(tmp_path / each, "flux1-dev", offload=each) for each in ("off", "blocks")]
    results = []
    for config in split:
        with tiny.quick_tokenizers():
            run, _ = prepare(config)
        run.step.split = 2
        results.append(load_file(run.train().path))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for more, message in (({"shard": True}, "shard: each process"), ({"compile": "on"}, "compile: blocks that")):
        with pytest.raises(ConfigError, match=message):
            TrainConfig.of(dataset="-", offload="blocks", **more)
    config = TrainConfig.of(dataset="-", offload="blocks")
    assert any("offload" in problem for problem in compile_problems({}, config, torch.device("cpu")))


def test_text_encoders_are_streamed_while_they_encode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = HostCopies.send

    def record(self: HostCopies, target: torch.Tensor, source: torch.Tensor, after: Any) -> None:
        sizes.append(source.numel())
        send(self, target, source, after)

    monkeypatch.setattr(HostCopies, "send", record)
    with tiny.quick_tokenizers():
        run, _ = prepare(settings(tmp_path, "sd3-medium", offload="blocks"))
    task: Any = run.task
    copied = task.offloader
    assert sizes and copied._streams.keys() == {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert all(stream._ring is None for stream in copied._streams.values()), "stopped"


def test_a_run_that_reads_the_quantized_base_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is resumed: it is known by the weights that the cached ones were made from."""
    monkeypatch.setattr(quantized_cache, "SMALLEST", 0)
    more: dict[str, Any] = {"quantize": "int8", "gradient_checkpointing": "full", "steps": 2}
    plain = outcome(settings(tmp_path / "plain", "flux1-dev", quantized_cache_gb=0, **more))
    assert not (tmp_path / "plain" / "cache" / "quantized").exists()
    first = outcome(settings(tmp_path / "runs", "flux1-dev", **more | {"steps": 1}))
    notes = [str(record.get("text")) for record in first[3]]
    assert any("the next start reads the quantized base" in note for note in notes), notes
    monkeypatch.delattr(Quantizer, "arrived")
    resumed = outcome(settings(tmp_path / "runs", "flux1-dev", resume="auto", **more))
    assert any("read from the cache" in str(record.get("text")) for record in resumed[3])
    assert resumed[1] == plain[1]
    output = {"output": str(tmp_path / "streamed"), "offload": "blocks"}
    streamed = outcome(settings(tmp_path / "runs", "flux1-dev", **more, **output), poison=True)
    assert streamed[:2] == plain[:2]


def test_a_base_that_was_quantized_for_generating_has_no_digests(tmp_path: Path) -> None:
    config = settings(tmp_path, "flux1-dev", quantize="int8")
    with tiny.quick_tokenizers():
        run, _ = prepare(config)
    blank: Any = run.model
    names = dict.fromkeys(blank.denoiser.state_dict(), "-")
    for extra, complete in (({}, False), ({"digests": names}, False), ({"digests": names, "samples": names}, True)):
        cached = quantized_cache.CachedBase(None, "int8", "", extra)  # type: ignore[arg-type]
        assert usable(cached, blank) is (cached if complete else None)
    assert usable(None, blank) is None
