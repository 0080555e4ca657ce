"""Language models: tiny ones of two kinds, taught from texts, read back by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inweave.errors import ConfigError, FormatError, MemoryBudgetError
from inweave.models.language_models import load_language_model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.texts import read_texts
from inweave.training.session import check, prepare, train
from inweave.training.tasks.language import LanguageTask
from inweave.weights.streaming import activations
from tests.unit.training.tiny import file_bits

SONG = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog sat on a mat", "the mat and the log"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_language_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2")}


def write_language_model(kind: str, folder: Path) -> Path:
    """A llama whose tokenizer begins a text with a mark, or a gpt2 whose tokenizer does not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import (  # type: ignore[attr-defined]
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        SONG, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    if kind == "llama":
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    common = {
        "vocab_size": words.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2
    }  # fmt: skip
    torch.manual_seed(0)
    network: Any = (
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=64, **common,
            )
        )
        if kind == "llama"
        else GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, **common))
    )  # fmt: skip
    network.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "song.txt"
    path.write_text("\n\n".join(SONG) + "\n", "utf-8")
    return path


def configured(model: Path, dataset: Path, output: Path, **settings: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model": str(model), "dataset": str(dataset), "output": str(output), "name": "song", "rank": 4, "batch_size": 2,
        "steps": 12, "learning_rate": 2e-2, "device": "cpu", "log_every": 1, "save_dtype": "fp32",
    }  # fmt: skip
    return TrainConfig.of(**{**usual, **settings})


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_run_trains_and_peft_reproduces_the_logits(
    kind: str, folders: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    config = configured(folders[kind], texts, tmp_path / "out", steps=40, learning_rate=0.02)
    run = prepare(config)[0]
    report = run.train()
    assert sum(report.losses[-3:]) < 0.8 * sum(report.losses[:3])
    assert report.path == tmp_path / "out" / "song"
    assert sorted(path.name for path in report.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    batch = run.task.sample_batch((0, 1), [])
    fed = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        mine = run.model.eval()(**fed).logits
        fresh, _ = load_language_model(folders[kind], CPU, torch.float32)
        plain = fresh(**fed).logits
        theirs = PeftModel.from_pretrained(fresh, str(report.path)).eval()(**fed).logits
    # the same products in the same order, but for where the scale (1 here: alpha is the rank) is multiplied in
    assert torch.allclose(mine, theirs, rtol=0, atol=32 * 2**-24 * float(mine.abs().max()))
    assert (mine - plain).abs().max() > 1000 * (mine - theirs).abs().max() and (mine - plain).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_the_completion_and_its_end_count_in_the_loss(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "the cat sat", "completion": " on the mat"}, {"text": "the dog"}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", "utf-8")
    network, tokenizer = load_language_model(folders[kind], CPU, torch.float32)
    task = LanguageTask(network, tokenizer, read_texts(file), configured(folders[kind], file, tmp_path))
    batch = task.sample_batch((0, 1), [])
    ids, labels = batch["input_ids"], batch["labels"]
    begins = [0] if kind == "llama" else []
    assert ids[0].tolist()[: len(begins)] == begins
    assert tokenizer.decode([label for label in labels[0].tolist() if label >= 0]) == " on the mat</s>"
    assert tokenizer.decode([label for label in labels[1].tolist() if label >= 0]) == "the dog</s>"
    assert (labels[1] < 0).sum() == len(begins) + int((batch["attention_mask"][1] == 0).sum())
    # predictions of tokens outside the loss change nothing, good or bad
    loss = task.loss(batch)
    trained_labels = labels.clone()
    trained_labels[0, 1] = ids[0, 1]
    assert task.loss({**batch, "labels": trained_labels}) != loss
    total, tokens = 0.0, 0
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    for row in range(2):
        positions = [n for n in range(1, ids.shape[1]) if labels[row, n] >= 0]
        total -= sum(float(logits[row, n - 1, ids[row, n]]) for n in positions)
        tokens += len(positions)
    assert float(loss) == pytest.approx(total / tokens, rel=1e-5) and task.weight(batch) == tokens


def test_long_texts_are_truncated_and_padding_does_not_count(folders: dict[str, Path], tmp_path: Path) -> None:
    network, tokenizer = load_language_model(folders["gpt2"], CPU, torch.float32)
    text = " ".join(SONG)
    config = configured(folders["gpt2"], tmp_path, tmp_path)
    task = LanguageTask(network, tokenizer, [("", text), ("", "a cat")], config)
    assert all(len(ids) <= 16 for ids, _ in task.examples) and len(task.examples) > 2
    assert [token for ids, _ in task.examples[:-1] for token in ids] == [*tokenizer(text).input_ids, 1]
    short = len(task.examples) - 1
    single, padded = task.sample_batch((short,), []), task.sample_batch((short, 0), [])
    row = {name: value[:1] for name, value in padded.items()}
    assert float(task.loss(single)) == pytest.approx(float(task.loss(row)), rel=1e-5)


def test_a_run_resumes_exactly(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 6, "dropout": 0.1, "validation_split": 0.25, "save_every": 2, "keep_last": 0}
    straight = train(configured(folders["llama"], texts, tmp_path / "a", **settings))
    again = train(
        configured(
            folders["llama"], texts, tmp_path / "b", resume=str(tmp_path / "a/song-state/step-000004"), **settings
        )
    )
    assert again.losses == straight.losses[4:] and again.validation == straight.validation
    one, two = ((path / "adapter_model.safetensors").read_bytes() for path in (straight.path, again.path))
    assert one[-2000:] == two[-2000:]
    texts.write_text(texts.read_text() + "\nanother\n")
    with pytest.raises(ConfigError, match="dataset"):
        train(configured(folders["llama"], texts, tmp_path / "a", resume="auto", **settings))


def test_a_check_reads_everything_and_writes_nothing(folders: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    config, report, needs = check(
        configured(folders["llama"], texts, tmp_path / "out", validation_split=0.25, epochs=3, steps=None)
    )
    assert (config.dialect, config.precision, config.targets) == ("peft", "fp32", "all")
    assert report.as_dict()["texts"] == 4 and report.as_dict()["held_out"] == 1 and "4 texts" in report.lines()[0]
    assert not (tmp_path / "out").exists()
    trainable = sum(p.numel() for p in prepare(config)[0].trainable.parameters.values())
    assert needs["trained_parameters"] == trainable


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dialect": "kohya"}, "dialect: a language model cannot"),
        ({"dialect": "diffusers"}, "dialect: a language model cannot"),
        ({"sample_every": 5}, "sample_every: samples are images"),
        ({"dataset": Path("folder")}, r"\.txt or \.jsonl"),
    ],
)
def test_invalid_settings_are_refused_before_the_model_is_read(
    settings: dict[str, Any], message: str, folders: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(configured(folders["llama"], **{"dataset": texts, "output": tmp_path / "out", **settings}))


def test_a_folder_that_lacks_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(folders["gpt2"], tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    lost = next(name for name in weights if name.endswith("h.0.mlp.c_fc.weight"))
    save_file({n: t for n, t in weights.items() if n != lost}, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"the weights lack .*c_fc.weight' \(1 missing\)"):
        load_language_model(broken, CPU, torch.float32)
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(FormatError, match="not a causal language model"):
        load_language_model(broken, CPU, torch.float32)
    (broken / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"no \.safetensors weights"):
        load_language_model(broken, CPU, torch.float32)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_memory_limit_is_met_with_batches_in_parts(
    kind: str, folders: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    """The plan is reported, the second step is measured against it, and the adapter is that of the same parts by hand.

    Against whole batches only rounding differs.
    """
    settings = {
        "model": str(folders[kind]),
        "dataset": str(texts),
        "steps": 2,
        "rank": 2,
        "device": "cpu",
        "save_dtype": "fp32",
    }
    _, _, needs = check(TrainConfig.of(**settings, batch_size=4))
    assert needs["seconds"] > 0 and needs["trained_parameters"] > 0
    vram = f"{(needs['total_bytes'] - 4096) / 2**20:.4f}MiB"
    settled, _, plan = check(TrainConfig.of(**settings, batch_size=4, vram=vram))
    assert (settled.batch_size, settled.gradient_accumulation) == (4, 1)
    assert "batches of 4 are computed 2 at a time" in "\n".join(plan["choices"])
    assert plan["total_bytes"] < needs["total_bytes"] - 4096
    records: list[Any] = []
    planned = train(
        TrainConfig.of(**settings, batch_size=4, vram=vram, output=str(tmp_path / "a")), on_record=records.append
    )
    measured = next(record for record in records if "measured_bytes" in record)
    share = measured["measured_bytes"] / plan["activation_bytes"]
    assert 0.5 < share < 1.15, "the plan is for the longest text; a batch may have shorter ones"
    by_hand, _ = prepare(TrainConfig.of(**settings, batch_size=4, output=str(tmp_path / "b")))
    by_hand.step.split = 2
    in_parts = by_hand.train()
    assert planned.losses == in_parts.losses
    assert file_bits(planned.path) == file_bits(in_parts.path)
    whole = train(TrainConfig.of(**settings, batch_size=4, output=str(tmp_path / "c")))
    assert planned.losses == pytest.approx(whole.losses, rel=1e-5)
    with pytest.raises(MemoryBudgetError, match=r"raise the limit|larger limit"):
        check(TrainConfig.of(**settings, vram="1024.01MiB"))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"gradient_checkpointing": "full", "offload_activations": "on"}),
        ("llama", {"gradient_checkpointing": "selective", "gradient_accumulation": 2}),
        ("gpt2", {"gradient_checkpointing": "off"}),
    ],
)
def test_blocks_in_host_memory_change_no_bit(
    kind: str, more: dict[str, Any], folders: dict[str, Path], texts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(activations, "SMALLEST", 0)
    results = []
    for offload in ("off", "blocks"):
        config = configured(folders[kind], texts, tmp_path / offload, steps=4, offload=offload, **more)
        run, _ = prepare(config)
        task: Any = run.task
        if offload == "blocks":
            assert task.stream.streamed_bytes > 0 and any("are in host memory" in note for _, note in run.notes)
            for slot in task.stream._ring._slots:
                slot.fill_(255)  # nothing of the base may be read but what was copied for it
        results.append(run.train())
    resident, streamed = results
    assert streamed.losses == resident.losses and file_bits(streamed.path) == file_bits(resident.path)
