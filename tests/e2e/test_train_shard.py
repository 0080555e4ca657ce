"""A base sharded over two processes: the adapter of two that hold all of it, in half the memory, also after a kill."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inweave.training.checkpoint.store import checkpoints
from tests.forked import run_forked
from tests.peers import tiny_models
from tests.unit.training.image_sets import make_set

#: what each process runs: it reports how many bytes it holds at the end, by its own count and by all tensors there are
WORKER = """
import gc, json, os, signal, sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from tests.e2e.ranks import run_ranks
from inweave.generate import pipeline
from inweave.training.config.schema import TrainConfig
from inweave.training.session import prepare
from inweave.training.distributed.fsdp import frozen_bytes
from inweave.training.distributed.world import join
from inweave.ops.quantized import dequantizing, fp8
dequantizing.DequantizingLinear.SMALLEST_SIDE = fp8.SMALLEST_SIDE = 16  # the narrow layers of tiny models will do
fp8.Fp8Linear.device_problems = lambda device: []  # the CPU multiplies what a GPU would

def work():
    world = join("cpu")
    for settings in json.loads(sys.argv[1]):
        dies = settings.pop("dies", None)
        config = TrainConfig.of(**settings)
        run, sample = prepare(config, world)

        def kill_at(record):
            if record.get("step") == dies:
                os.kill(os.getpid(), signal.SIGKILL)

        summary = run.train(sample=sample, on_record=kill_at)
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        network = run.task.networks.get("unet", run.task.networks.get("model"))
        Path(config.output, f"report-{world.rank}.json").write_text(json.dumps([
            *frozen_bytes(network), sum(storages.values()), summary.losses, summary.validation,
            len(run.task.held_out)]))
        del run, sample, summary, tensors, network
        gc.collect()
    world.leave()

run_ranks(work)
"""


def launched(settings: dict[Path, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """One run after the other in the same two processes, each with an output folder of its own."""
    for folder in settings:
        folder.mkdir(parents=True, exist_ok=True)
    common = {"name": "t", "device": "cpu", "save_dtype": "fp32", "log_every": 1}
    runs = [{"output": str(folder), **common, **each} for folder, each in settings.items()]
    return run_forked(WORKER, json.dumps(runs), folder=folder)


def reports(folder: Path) -> list[list[Any]]:
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in (0, 1)]


def bits(file: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


#: of a UNet only what lies after its last skip connection: what comes before is added up in another order
CASES: dict[str, dict[str, Any]] = {
    "flux1-dev": {"targets": "attention-mlp", "network": "dora", "gradient_checkpointing": "full", "sample_every": 2,
                  "sample_prompts": ["a boat --w 64 --h 64 --s 2", "a cat --w 64 --h 64 --s 1"]},
    "sd1.5": {"targets": "up_blocks.*to_[qv]", "gradient_checkpointing": "selective"},
}  # fmt: skip


@pytest.mark.parametrize("variant", ["flux1-dev", pytest.param("sd1.5", marks=pytest.mark.full)])
def test_the_same_adapter_in_half_the_memory(variant: str, tmp_path: Path) -> None:
    captions = {f"p{number}": f"an image of {number}" for number in range(7)}
    settings = {
        "model": str(tiny_models.folder(variant)), "dataset": str(make_set(tmp_path / "set", captions)), "rank": 2,
        "steps": 3, "batch_size": 1, "resolution": 64, "cache_dir": str(tmp_path / "cache"), "ema_decay": 0.5,
        "dropout": 0.1, "validation_split": 0.4, "learning_rate": 1e-2, **CASES[variant],
    }  # fmt: skip
    result = launched(
        {tmp_path / "whole": {**settings, "shard": False}, tmp_path / "spread": {**settings, "shard": True}}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    whole, sharded = reports(tmp_path / "whole"), reports(tmp_path / "spread")
    assert bits(tmp_path / "spread" / "t.safetensors") == bits(tmp_path / "whole" / "t.safetensors")
    assert [each[3:] for each in sharded] == [each[3:] for each in whole]
    assert sharded[0][-1] == 3, "an odd number of batches is held out: one process has none left in the last round"
    for before, after in zip(whole, sharded, strict=True):
        base = before[1]
        assert before[0] == base == after[1] and 0.5 <= after[0] / base < 0.55
    freed = [before[2] - after[2] for before, after in zip(whole, sharded, strict=True)]
    assert freed[0] > 0.45 * whole[0][1], "no other reference keeps the released weights alive"
    if "sample_every" in settings:  # the second one draws too, which leaves it with things it had no use for before
        samples = [sorted((tmp_path / name / "samples").iterdir()) for name in ("whole", "spread")]
        assert [p.name for p in samples[0]] == [p.name for p in samples[1]] == ["t-000002-0.png", "t-000002-1.png"]
        assert [p.read_bytes() for p in samples[0]] == [p.read_bytes() for p in samples[1]]
    else:
        assert freed[1] > 0.45 * whole[1][1]
    lines = [json.loads(line) for line in (tmp_path / "spread" / "t.jsonl").read_text().splitlines()]
    first = itertools.takewhile(lambda line: "loss" not in line, lines)  # the first step
    notes = [line["text"] for line in first if line["event"] == "memory"]
    assert len(notes) == 1 and f"holds {sharded[0][0]:,} of {sharded[0][1]:,} bytes" in notes[0]


@pytest.mark.parametrize(
    "formats",
    [
        {"nf4": "selective"},
        pytest.param({"int8": "off", "int8-hadamard": "full", "fp8": "full"}, marks=pytest.mark.full),
    ],
    ids=["nf4", "others"],
)
def test_quantized(formats: dict[str, str], tmp_path: Path) -> None:
    """Numbers and scales are shared out: the adapter of processes that hold the whole quantized base."""
    captions = {f"p{number}": f"an image of {number}" for number in range(3)}
    settings = {
        "model": str(tiny_models.folder("flux1-dev")), "dataset": str(make_set(tmp_path / "set", captions)), "rank": 2,
        "steps": 2, "batch_size": 1, "resolution": 64, "cache_dir": str(tmp_path / "cache"), "learning_rate": 1e-2,
        "targets": "attention-mlp",
    }  # fmt: skip
    runs = {
        tmp_path / f"{kind}-{shard}": {
            **settings, "quantize": kind, "gradient_checkpointing": checkpointing, "shard": shard,
            "precision": "bf16" if kind == "fp8" else "fp32",
        }
        for kind, checkpointing in formats.items()
        for shard in (False, True)
    }  # fmt: skip
    result = launched(runs)
    assert result.returncode == 0, result.stderr[-3000:]
    for kind in formats:
        folders = [tmp_path / f"{kind}-{shard}" for shard in (False, True)]
        whole, sharded = map(reports, folders)
        assert bits(folders[1] / "t.safetensors") == bits(folders[0] / "t.safetensors")
        assert [each[3:] for each in sharded] == [each[3:] for each in whole]
        for before, after in zip(whole, sharded, strict=True):
            assert before[1] == after[1] and 0.5 <= after[0] / before[1] < 0.56
            assert before[2] - after[2] > 0.4 * before[1], "no other reference keeps the whole weights alive"


@pytest.mark.full
def test_killed_and_resumed(tmp_path: Path) -> None:
    """A language model; one process is killed after step 3, and both resume from step 2."""
    texts = tmp_path / "song.txt"
    texts.write_text("\n\n".join(["a cat on a mat", "a dog on a log", "a cat and a dog", "a mat and a log"]))
    settings = {
        "model": str(llama(tmp_path / "llama")), "dataset": str(texts), "steps": 6, "rank": 2, "batch_size": 1,
        "save_every": 2, "learning_rate": 1e-2, "targets": "attention-mlp", "gradient_checkpointing": "full",
    }  # fmt: skip
    straight = launched({tmp_path / "whole": settings})
    assert straight.returncode == 0, straight.stderr[-3000:]
    killed = launched({tmp_path / "spread": {**settings, "shard": True, "dies": 3}})
    assert killed.returncode != 0 and [p.name for p in checkpoints(tmp_path / "spread" / "t-state")] == ["step-000002"]
    again = launched({tmp_path / "spread": {**settings, "shard": True, "resume": "auto"}})
    assert again.returncode == 0, again.stderr[-3000:]
    files = [tmp_path / name / "t" / "adapter_model.safetensors" for name in ("whole", "spread")]
    assert bits(files[0]) == bits(files[1])
    (whole, *_), (sharded, other) = reports(tmp_path / "whole"), reports(tmp_path / "spread")
    assert sharded[3] == other[3] == whole[3][2:]
    assert sharded[0] == other[0] == whole[0] / 2


def llama(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[attr-defined]

    letters = {letter: number for number, letter in enumerate(["</s>", *pre_tokenizers.ByteLevel.alphabet()])}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    size = LlamaConfig(
        vocab_size=len(letters) + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(size).save_pretrained(folder)
    return folder
