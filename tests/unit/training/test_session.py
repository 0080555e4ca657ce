"""Preparing a run: what cannot work is refused before weights are read, and a checkpoint is read once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.models.model import load_model
from inweave.training.checkpoint import store
from inweave.training.config.schema import TrainConfig
from inweave.training.session import check, prepare, train
from tests.unit.training.tasks.test_language import SONG, write_language_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("inweave.training.tasks.diffusion_setup.load_model", refuse)
    monkeypatch.setattr("inweave.training.tasks.language_setup.load_language_model", refuse)


def configured(kind: str, llama: Path, output: Path, **settings: Any) -> TrainConfig:
    texts = output.parent / "song.txt"
    texts.write_text("\n\n".join(SONG), "utf-8")
    model, dataset = (str(llama), str(texts)) if kind == "language" else ("inweave/emoji", "inweave/pixel")
    usual = {
        "model": model,
        "dataset": dataset,
        "output": str(output),
        "name": "x",
        "rank": 2,
        "steps": 1,
        "device": "cpu",
    }
    return TrainConfig.of(**{**usual, **settings})


REFUSED: dict[str, tuple[dict[str, Any], type[InweaveError], str]] = {
    "a target that matches nothing": ({"targets": ["to_qq"]}, ConfigError, "targets: .*to_qq"),
    "a rule that matches nothing": ({"rules": [{"pattern": "nowhere", "rank": 1}]}, ConfigError, "rules: .*nowhere"),
    "a checkpoint that does not exist": ({"resume": "nowhere"}, ConfigError, "resume: nowhere is not a checkpoint"),
    "a start_from that does not exist": ({"start_from": "nowhere.safetensors"}, FormatError, "nowhere.safetensors"),
    "a validation split of no example": ({"validation_split": 0.001}, ConfigError, "validation_split"),
    "a shard with one process": ({"shard": True}, ConfigError, "shard: there is only one process"),
}


@pytest.mark.parametrize("kind", ["image", "language"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_work_reads_no_weights(
    case: str, kind: str, llama: Path, tmp_path: Path, no_weights: None
) -> None:
    settings, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        prepare(configured(kind, llama, tmp_path / "out", **settings))
    with pytest.raises(AssertionError, match="weights were read"):  # and the lock of the refused run is gone
        prepare(configured(kind, llama, tmp_path / "out"))


@pytest.mark.parametrize("kind", ["image", "language"])
def test_an_existing_output_is_refused_before_weights_are_read(
    kind: str, llama: Path, tmp_path: Path, no_weights: None
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x.safetensors").write_bytes(b"")
    config = configured(kind, llama, tmp_path / "out")
    with pytest.raises(ConfigError, match="the adapter exists"):
        prepare(config)
    assert "the adapter exists" in check(config)[2]["problems"][0]


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        ({"tensorboard": True}, "tensorboard", "tensorboard"),
        ({"wandb": True}, "wandb", "wandb"),
        ({"optimizer": "prodigy", "learning_rate": 1.0}, "prodigyopt", "train"),
        ({"optimizer": "schedulefree"}, "schedulefree", "train"),
    ],
)
def test_a_missing_library_is_refused_before_weights_are_read(
    settings: dict[str, Any], package: str, extra: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    no_weights: None,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    for verb in (prepare, check):
        with pytest.raises(ConfigError, match=rf"pip install 'inweave\[{extra}\]'"):
            verb(configured("language", llama, tmp_path / "out", **settings))
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_reads_its_checkpoint_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"warmup": 0, "lr_scheduler": "constant", "vram": "8GiB"}
    train(configured("language", llama, tmp_path / "out", **settings))
    reads: list[Path] = []
    load_state = store.load_state

    def amount(checkpoint: Path) -> store.State:
        reads.append(checkpoint)
        return load_state(checkpoint)

    monkeypatch.setattr(store, "load_state", amount)
    report = train(configured("language", llama, tmp_path / "out", steps=2, resume="auto", **settings))
    assert (report.step, [path.name for path in reads]) == (2, ["step-000001"])


def test_an_assistant_is_merged_into_the_base_and_not_into_the_file(tmp_path: Path) -> None:
    """The run trains on W + B A, its file holds its own two factors, and a missing file is refused before weights."""
    base = load_model("inweave/emoji", device="cpu", dtype="fp32", keep="file").networks["unet"].state_dict()
    name = next(name for name in base if name.endswith("attn1.to_q.weight"))
    down, up = torch.full((1, base[name].shape[1]), 0.1), torch.full((base[name].shape[0], 1), 0.2)
    file, module = tmp_path / "assistant.safetensors", name.removesuffix(".weight")
    save_file({f"unet.{module}.lora_A.weight": down, f"unet.{module}.lora_B.weight": up}, file)
    settings = {"assistant": str(file), "targets": [module], "precision": "fp32", "warmup": 0}
    run, _ = prepare(configured("image", tmp_path, tmp_path / "out", **settings))
    weights = run.task.networks["unet"].state_dict()
    (place,) = [key for key in weights if key.startswith(module) and weights[key].shape == base[name].shape]
    torch.testing.assert_close(weights[place], base[name] + up @ down, rtol=0, atol=1e-6)
    result = train(configured("image", tmp_path, tmp_path / "trained", **settings))
    with safe_open(result.path, "pt") as saved:
        assert str(file) not in str(saved.metadata())
        assert {key.partition(".")[0] for key in saved.keys()} == {  # noqa: SIM118
            f"lora_unet_{module.replace('.', '_')}"
        }
    with pytest.raises(FormatError, match="nowhere"):
        prepare(configured("image", tmp_path, tmp_path / "no", assistant="nowhere.safetensors"))
