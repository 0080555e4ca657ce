"""inweave train: options that are duplicated, have no effect or contradict `start_from` are reported, not dropped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("diffusers")

from inweave.cli.app import app
from inweave.models.embedded import folder, style_folder
from tests.e2e.test_train_command import invoked, metadata, quick
from tests.unit.training.tasks.test_language import SONG, write_language_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A plain adapter of rank 2 on to_q."""
    output = tmp_path_factory.mktemp("first")
    invoked(*quick(output, cache, "--steps", 2))
    return output / "lora.safetensors"


def starting_from(first: Path, output: Path, cache: Path, *more: object) -> tuple[object, ...]:
    return (
        "--dataset", style_folder("pixel"), "--output", output, "--steps", 1, "--set", f"start_from={first}",
        "--set", "device=cpu", "--set", "resolution=64", "--set", f"cache_dir={cache}", *more,
    )  # fmt: skip


def test_start_from_brings_its_own_settings_and_others_are_refused(first: Path, tmp_path: Path, cache: Path) -> None:
    options = (
        "--rank", 16, "--alpha", 3, "--set", "network=loha", "--set", "rslora=true", "--set", 'targets=["to_k"]',
    )  # fmt: skip
    report = invoked(*starting_from(first, tmp_path / "out", cache, *options), code=2)
    for problem in (
        "network: start_from has 'lora', but 'loha' is set",
        "rank: start_from has 2, but 16 is set",
        "alpha: start_from has 2.0, but 3.0 is set",
        "rslora: start_from has False, but True is set",
        "targets: start_from adapts 14 modules, which are not the 14 of to_k",
    ):
        assert f"{problem}; leave it out, or train without start_from" in report, report
    assert not (tmp_path / "out" / "lora.safetensors").exists()


def test_metadata_describes_the_adapter_that_was_trained(first: Path, tmp_path: Path, cache: Path) -> None:
    invoked(*starting_from(first, tmp_path / "a", cache))
    header = metadata(tmp_path / "a" / "lora.safetensors")
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("2", "2"), "not the preset's"
    invoked(*quick(tmp_path / "dora", cache, "--steps", 1, "--set", "network=dora"))
    invoked(*starting_from(tmp_path / "dora" / "lora.safetensors", tmp_path / "b", cache))
    header = metadata(tmp_path / "b" / "lora.safetensors")
    assert header["ss_network_module"] == "lycoris.kohya"
    assert json.loads(header["ss_network_args"]) == {"algo": "lora", "dora_wd": "True", "rs_lora": "False"}
    wide = ("--set", "network=locon", "--set", "conv_rank=3", "--set", "conv_alpha=1")
    invoked(*quick(tmp_path / "c", cache, "--steps", 1, *wide))
    header = metadata(tmp_path / "c" / "lora.safetensors")
    assert (json.loads(header["ss_network_args"])["conv_dim"], json.loads(header["ss_network_args"])["conv_alpha"]) == (
        "3",
        "1",
    )
    assert header["ss_network_module"] == "networks.lora" and header["ss_network_dim"] == "2"
    assert (header["ss_epoch"], header["ss_num_epochs"], header["ss_num_batches_per_epoch"]) == ("1", "1", "12")


def test_a_requested_warmup_is_used_or_refused(tmp_path: Path, cache: Path) -> None:
    options = ("--steps", 4, "--set", "lr_scheduler=constant", "--lr", 1e-3)
    invoked(*quick(tmp_path / "out", cache, *options, "--set", "warmup=3"))
    rates = [json.loads(line).get("lr") for line in (tmp_path / "out" / "lora.jsonl").read_text().splitlines()]
    assert [rate for rate in rates if rate] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert metadata(tmp_path / "out" / "lora.safetensors")["ss_lr_warmup_steps"] == "3"
    report = invoked(*quick(tmp_path / "other", cache, *options, "--set", "warmup=4"), code=2)
    assert "warmup must leave steps to train" in report


def test_a_check_finds_what_a_run_would_refuse(first: Path, tmp_path: Path, cache: Path) -> None:
    report = json.loads(invoked(*quick(first.parent, cache, "--steps", 2, "--check", "--json"), code=2))
    assert not report["ok"] and "checkpoints of an earlier run" in report["problems"][0] and report["dataset"]
    wrong = ("--set", "start_from=nope.safetensors", "--set", "validation_split=0.001")
    report_text = invoked(*quick(tmp_path / "out", cache, "--steps", 2, "--check", *wrong), code=2)
    assert "this run would be refused: validation_split: a share of 0.001" in report_text
    assert "this run would be refused: start_from: nope.safetensors" in report_text and "steps:" in report_text


def test_a_check_knows_what_this_device_cannot_do(tmp_path: Path, cache: Path) -> None:
    impossible = ("--set", "graph=on", "--set", "compile=on")
    for more in (("--check",), ()):
        report = invoked(*quick(tmp_path / "out", cache, "--steps", 2, *more, *impossible), code=2)
        assert 'graph = "on": device cpu: only NVIDIA GPUs have CUDA graphs; leave it out' in report
        assert 'compile = "on": device cpu: blocks are compiled for NVIDIA GPUs' in report
    assert not (tmp_path / "out").exists()


def test_a_check_adds_up_and_says_that_nothing_is_limited_here(tmp_path: Path, cache: Path) -> None:
    report = invoked(*quick(tmp_path / "out", cache, "--steps", 2, "--vram", "auto", "--check"))
    assert 'vram = "auto" uses the free memory of a GPU, and device cpu is not one' in report
    assert "CUDA         1.00 GiB" in report and " seconds for 2 steps" in report


def test_duplicate_and_ineffective_options_are_refused(tmp_path: Path, cache: Path) -> None:
    report = invoked("--dataset", "d", "--rank", 2, "--set", "rank=4", code=2)
    assert "--set rank=4: rank is already set to 2; set it once" in report
    assert "write SETTING=VALUE" in invoked("--dataset", "d", "--set", "=3", code=2)
    theirs = tmp_path / "k.toml"
    theirs.write_text("network_dim = 4\n")
    assert "--import only prints a configuration" in invoked("--import", theirs, "--check", code=2)
    file = tmp_path / "run.toml"
    file.write_text(f'dataset = "{style_folder("pixel")}"\nmax_data_loader_n_workers = 2\n')
    notes = invoked(file, "--check", "--set", "device=cpu", "--output", tmp_path / "o", "--set", f"cache_dir={cache}")
    assert "note: " in notes and "UserWarning" not in notes


def test_a_run_reports_what_it_leaves_out(tmp_path: Path, cache: Path) -> None:
    photos = tmp_path / "photos"
    (photos / "extra" / "deeper").mkdir(parents=True)
    for number, name in enumerate(("a", "b", "c", "extra/deeper/d")):
        Image.new("RGB", (96, 96), (60 * number, 90, 200)).save(photos / f"{name}.png")
    (photos / "scan.psd").write_bytes(b"8BPS")
    (photos / "bad.png").write_bytes((photos / "a.png").read_bytes()[:60])
    (photos / "a.txt").write_text("a cat")
    (photos / "b.txt").write_text("word " * 300)
    arguments = [photos if each == style_folder("pixel") else each for each in quick(tmp_path / "out", cache)]
    report = invoked(*arguments, "--steps", 1, "--skip-unreadable")
    records = [json.loads(line) for line in (tmp_path / "out" / "lora.jsonl").read_text().splitlines()]
    logged = "\n".join(record["text"] for record in records if record.get("event") == "dataset")
    for name in ("bad.png", "scan.psd", "extra", "c.png"):
        assert name in report and name in logged, report
    assert "captions: the longest takes" in report and "b.png" in report
    estimates = []
    for words in (300, 3):
        (photos / "b.txt").write_text("word " * words)
        checked = json.loads(
            invoked(*arguments[:4], "--output", tmp_path / "new", "--skip-unreadable", "--check", "--json")
        )
        estimates.append(checked["estimate"])
        assert any("captions: the longest" in line for line in checked["estimate"]["choices"]) == (words == 300)
    assert estimates[0]["activation_bytes"] > estimates[1]["activation_bytes"], (
        "what captions are padded to is kept too"
    )


def test_a_trigger_precedes_every_caption(tmp_path: Path, cache: Path) -> None:
    invoked(*quick(tmp_path, cache, "--steps", 1, "--trigger", "ohwx thing"))
    assert metadata(tmp_path / "lora.safetensors")["modelspec.trigger_phrase"] == "ohwx thing"


def test_a_language_model_rejects_image_settings(tmp_path: Path) -> None:
    folder = write_language_model("llama", tmp_path / "llama")
    (tmp_path / "song.txt").write_text("\n\n".join(SONG))
    options = ("--set", "masked_loss=true", "--set", "flip=true", "--trigger", "x", "--set", "resolution=64")
    report = invoked(
        "--model", folder, "--dataset", tmp_path / "song.txt", "--output", tmp_path / "o", *options, code=2
    )
    for name in ("masked_loss", "flip", "trigger", "resolution"):
        assert f"{name}: only applies to image models" in report


@pytest.mark.parametrize("model", ["sdxl", "sd3.5", "flux", "someone/something"])
def test_a_model_of_the_hub_is_downloaded_where_that_is_allowed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `generate` does: the same names, and the option that the message names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    command = ["train", "--model", model, "-d", str(style_folder("pixel")), "-o", str(tmp_path / "out"), "--rank", "32",
               "--alpha", "32", "--steps", "1000", "--lr", "1e-4", "--batch-size", "1", "--save-every", "250",
               "--fp16"]  # fmt: skip
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "not on this machine, and downloading is off" in refused.output
    assert "--allow-download" in refused.output and not (tmp_path / "out").exists()
    for check in ([], ["--check"]):
        unreachable = CliRunner().invoke(app, [*command, "--allow-download", *check])
        assert unreachable.exit_code == 2 and "could not be reached" in unreachable.output


def test_a_model_in_the_cache_of_the_hub_is_trained_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--something" / "snapshots" / ("0" * 40)
    shutil.copytree(folder(), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    command = [
        "train",
        "--model",
        "someone/something",
        "-d",
        str(style_folder("pixel")),
        "-o",
        str(tmp_path),
        "--check",
        "--json",
    ]
    result = CliRunner().invoke(app, [*command, "--set", "resolution=64", "--steps", "1", "--set", "min_bucket=32"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["config"]["model"] == "someone/something"
