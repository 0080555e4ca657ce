"""inweave train as a user runs it: files, metadata, exit codes, signals, what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from inweave.adapter import Tensor
from inweave.cli.app import app
from inweave.exchange.hashes import hash_file
from inweave.formats.dialects import dialect_named
from inweave.models.embedded import style_folder
from inweave.training import session
from inweave.training.checkpoint.store import checkpoints, load_state
from inweave.training.config.schema import TrainConfig
from tests.forked import ForkedProcess, fork_program
from tests.unit.training.tiny import file_bits, make_run, tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def invoked(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.output


def quick(output: Path, cache: Path, *more: object) -> tuple[object, ...]:
    """Arguments of a run of seconds on the embedded model."""
    return (
        "--model", "inweave/emoji", "--dataset", style_folder("pixel"), "--output", output, "--rank", 2,
        "--batch-size", 2,
        "--set", "device=cpu", "--set", "resolution=64", "--set", 'targets=["to_q"]', "--set", f"cache_dir={cache}",
        "--set", "save_dtype=fp32", "--set", "log_every=1", *more,
    )  # fmt: skip


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def bits(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def test_a_configuration_becomes_a_file_that_other_programs_know(tmp_path: Path, cache: Path) -> None:
    style = tmp_path / "style.toml"
    style.write_text(
        f'dataset = "{style_folder("pixel")}"\nmodel = "inweave/emoji"\nname = "pixels"\ntargets = ["to_q"]\n'
        "resolution = 64\n"
        f'rank = 2\nepochs = 3\ndevice = "cpu"\ntrigger = "pxl"\ncache_dir = "{cache}"\noutput = "{tmp_path}/nowhere"\n'
    )
    report = json.loads(
        invoked(style, "--output", tmp_path / "out", "--steps", 2, "--alpha", 1, "--lr", 1e-3, "-b", 2, "--json")
    )
    file = tmp_path / "out" / "pixels.safetensors"
    assert report["ok"] and Path(report["path"]) == file and report["step"] == 2 and len(report["losses"]) == 2
    assert not (tmp_path / "nowhere").exists(), "options go before the file"
    tensors, header = load_file(file), metadata(file)
    names = {name.rsplit(".", 2 if name.endswith("weight") else 1)[0] for name in tensors}
    assert all(name.startswith("lora_unet_") and name.endswith("_to_q") for name in names)
    assert {name.partition(".")[2] for name in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert {str(value.dtype) for name, value in tensors.items() if "lora" in name.split(".")[1]} == {"torch.float16"}
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["ss_steps"]) == ("2", "1", "2")
    assert (header["ss_learning_rate"], header["ss_mixed_precision"]) == ("0.001", "no")
    tags = json.loads(header["ss_tag_frequency"])
    assert list(tags) == ["pixel"] and sum(tags["pixel"].values()) >= 24
    assert header["modelspec.architecture"] == "inweave-emoji/lora" and header["modelspec.trigger_phrase"] == "pxl"
    assert header["ss_base_model_version"] == "inweave/emoji"
    raw = file.read_bytes()
    body = raw[8 + int.from_bytes(raw[:8], "little") :]
    assert header["sshs_model_hash"] == hashlib.sha256(body).hexdigest()
    assert hash_file(file).note is None and hash_file(file).autov3 == header["sshs_model_hash"][:12]
    assert len(header["sshs_legacy_hash"]) == 8
    again = tmp_path / "again.toml"
    again.write_text(header["inweave.config"])
    assert (TrainConfig.load(again).rank, TrainConfig.load(again).steps) == (2, 2)
    assert TrainConfig.load(again).dataset == "pixel", "a path by its last name"
    assert not any(
        str(where) in text for where in (tmp_path, style_folder("pixel").parent) for text in header.values()
    ), "local paths of the author are not published"
    assert header["modelspec.resolution"] == "64x64"
    assert CliRunner().invoke(app, ["check", str(file), "--base", "inweave/emoji"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "pixels-state",
        "pixels.jsonl",
        "pixels.safetensors",
    ]


def test_kohyas_hashes_are_those_kohya_computes(tmp_path: Path) -> None:
    """Kohya's own code: the file as it would be with only the ss_* metadata, in memory."""
    import io

    import safetensors.torch

    from inweave.formats.files import write_file
    from inweave.training.output.adapter_file import _add_hashes

    rng = np.random.default_rng(0)
    arrays = {f"m{n}.lora_up.weight": rng.standard_normal((600, 300)).astype("<f4") for n in range(3)}
    tensors = {name: Tensor("F32", value.shape, value.tobytes()) for name, value in arrays.items()}
    header = {"ss_steps": "4", "ss_x": "1", "modelspec.title": "t"}
    file = write_file(tmp_path / "a.safetensors", tensors, header)
    _add_hashes(file)
    kohya_fields = {name: value for name, value in header.items() if name.startswith("ss_")}
    stream = io.BytesIO(safetensors.torch.save({n: torch.from_numpy(a) for n, a in arrays.items()}, kohya_fields))
    stream.seek(0x100000)
    assert metadata(file)["sshs_legacy_hash"] == hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]
    assert metadata(file)["modelspec.title"] == "t" and hash_file(file).note is None


def test_a_real_run_resumes_bit_for_bit_and_samples_change_nothing(tmp_path: Path, cache: Path) -> None:
    more = ("--steps", 4, "--save-every", 2, "--lr", 0.05, "--set", "flip=true", "--set", "dropout=0.1",
            "--set", "ema_decay=0.9", "--set", "gradient_accumulation=2", "--set", "caption_dropout=0.5")  # fmt: skip
    straight = json.loads(invoked(*quick(tmp_path / "a", cache, *more), "--json"))
    sampled = ("--set", "sample_every=2", "--set", 'sample_prompts=["red apple", "cat"]', "--set", "sample_steps=2")
    checkpoint = tmp_path / "a" / "lora-state" / "step-000002"
    again = json.loads(invoked(*quick(tmp_path / "b", cache, *more, *sampled), "--resume", checkpoint, "--json"))
    assert again["losses"] == straight["losses"][2:]
    assert bits(Path(again["path"])) == bits(Path(straight["path"]))
    one, two = (load_state(tmp_path / name / "lora-state" / "step-000004").tensors for name in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    samples = sorted((tmp_path / "b" / "samples").iterdir())
    assert [path.name for path in samples] == ["lora-000004-0.png", "lora-000004-1.png"]
    by_prompt = dict(zip(("red apple", "cat"), samples, strict=True))
    for loras in (
        (f"--lora={again['path']}",),
        (),
    ):  # the file of that step generates the same image, the base another one
        for prompt, path in by_prompt.items():
            other = tmp_path / f"{len(loras)}-{path.name}"
            result = CliRunner().invoke(
                app, ["generate", prompt, "--steps", "2", "--seed", "42", "-o", str(other), *loras]
            )
            assert result.exit_code == 0, result.output
            with Image.open(path) as left, Image.open(other) as right:
                apart = np.abs(np.asarray(left, dtype=int) - np.asarray(right, dtype=int)).max()
            # merged into the weights or added to the output: the same values up to rounding, a level of 256 at most
            assert apart <= 1 if loras else apart > 1, (prompt, loras, apart)


@pytest.mark.parametrize("dialect", ["diffusers", "peft"])
def test_other_dialects(dialect: str, tmp_path: Path, cache: Path) -> None:
    report = json.loads(invoked(*quick(tmp_path, cache, "--steps", 1, "--set", f"dialect={dialect}"), "--json"))
    path = Path(report["path"])
    if dialect == "peft":
        assert path == tmp_path / "lora" and json.loads((path / "adapter_config.json").read_text())["r"] == 2
        names = load_file(path / "adapter_model.safetensors")
        assert all(name.startswith("base_model.model.") and ".lora_" in name for name in names)
    else:
        assert all(name.startswith("unet.") and ".lora" in name for name in load_file(path))
        assert len(metadata(path)["sshs_model_hash"]) == 64
    assert CliRunner().invoke(app, ["check", str(path), "--base", "inweave/emoji"]).exit_code == 0


# what is refused


def test_a_check_reports_and_writes_verdicts_alone(tmp_path: Path, cache: Path) -> None:
    before = set(cache.rglob("*"))
    report = invoked(*quick(tmp_path / "out", cache, "--steps", 5), "--check")
    assert "24 images" in report and "5 in total" in report and "memory, estimated" in report
    document = json.loads(invoked(*quick(tmp_path / "out", cache, "--steps", 5), "--check", "--json"))
    assert document["ok"] and document["config"]["steps"] == 5 and document["estimate"]["trained_parameters"] > 0
    assert not (tmp_path / "out").exists()
    assert set(cache.rglob("*")) - before <= {cache / "images.sqlite3"}


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        ((), "dataset: is required"),
        (("-d", "x", "--set", "lerning_rate=1"), "did you mean 'learning_rate'?"),
        (("-d", "x", "--set", "rank"), "write SETTING=VALUE"),
        (("-d", "x", "--rank", "0"), "rank: "),
        (("-d", "x", "--set", "optimizer=adamm"), "did you mean 'adamw'?"),
        (("-d", "/none/here", "-m", "inweave/emoji"), "/none/here"),
        (("none.toml",), "none.toml"),
        (("-d", "x", "--steps", "3", "--set", "epochs=2"), "steps and epochs"),
    ],
)
def test_bad_usage_is_reported_in_one_line(arguments: tuple[str, ...], report: str) -> None:
    assert report in invoked(*arguments, code=2)
    document = json.loads(invoked(*arguments, "--json", code=2))
    assert document["ok"] is False and report in document["error"]


def test_several_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('dataset = "x"\nrank = 0\nlr_schedule = "cosine"\n')
    report = invoked(file, code=2)
    assert "bad.toml:2: rank" in report and "did you mean 'lr_scheduler'" in report and "2 problems" in report


def test_another_trainers_configuration_is_turned_into_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "kohya.toml"
    theirs.write_text('pretrained_model_name_or_path = "m.safetensors"\ntrain_data_dir = "images"\nnetwork_dim = 4\n')
    assert "rank = 4" in invoked("--import", theirs)
    assert json.loads(invoked("--import", theirs, "--json"))["config"]["rank"] == 4


def test_an_existing_run_is_not_overwritten(tmp_path: Path, cache: Path) -> None:
    invoked(*quick(tmp_path, cache, "--steps", 1))
    before = bits(tmp_path / "lora.safetensors")
    assert "(--resume)" in invoked(*quick(tmp_path, cache, "--steps", 1, "--seed", 3), code=2)
    report = invoked(*quick(tmp_path, cache, "--steps", 1, "--seed", 3, "--resume", "auto", "--lr", 1e-5), code=2)
    assert (
        "learning_rate: this run was started with" in report
        and "seed: this run was started with 0, now it is 3" in report
    )
    assert bits(tmp_path / "lora.safetensors") == before
    assert "all steps are done" in invoked(*quick(tmp_path, cache, "--steps", 1), "--resume")


def dropped(adapter_file: Any) -> None:
    del adapter_file.tensors[sorted(adapter_file.tensors)[0]]


def dropped_module(adapter_file: Any) -> None:
    stem = sorted(adapter_file.tensors)[0].partition(".")[0]
    for name in [name for name in adapter_file.tensors if name.startswith(f"{stem}.")]:
        del adapter_file.tensors[name]


def dropped_alpha(adapter_file: Any) -> None:
    for name in [name for name in adapter_file.tensors if name.endswith("alpha")]:
        del adapter_file.tensors[name]


def other_numbers(adapter_file: Any) -> None:
    name = sorted(name for name in adapter_file.tensors if name.endswith("lora_down.weight"))[0]
    tensor = adapter_file.tensors[name]
    adapter_file.tensors[name] = Tensor(tensor.dtype, tensor.shape, bytes(len(tensor.data)))


def not_finite(adapter_file: Any) -> None:
    name = sorted(name for name in adapter_file.tensors if name.endswith("lora_down.weight"))[0]
    tensor = adapter_file.tensors[name]
    adapter_file.tensors[name] = Tensor(tensor.dtype, tensor.shape, b"\xff" * len(tensor.data))


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", [dropped, dropped_module, dropped_alpha, other_numbers, not_finite])
def test_a_file_that_is_not_what_was_trained_is_detected(
    damage: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = type(dialect_named("kohya"))
    write = writer.write

    def write_damaged(self: Any, *arguments: Any) -> Any:
        adapter_file = write(self, *arguments)
        damage(adapter_file)
        return adapter_file

    monkeypatch.setattr(writer, "write", write_damaged)
    report = invoked(*quick(tmp_path, cache, "--steps", 1, "--alpha", 1), code=1)
    assert "lora.new.safetensors" in report or "lora.safetensors" in report
    assert not (tmp_path / "lora.safetensors").exists() and not list(tmp_path.glob(".lora*"))
    monkeypatch.undo()
    invoked(*quick(tmp_path, cache, "--steps", 1, "--alpha", 1, "--resume", "auto"))
    assert (tmp_path / "lora.safetensors").is_file(), "the steps were not lost"


def test_out_of_memory_while_encoding_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("inweave.models.vae.encode_distribution", short)
    report = invoked(*quick(tmp_path / "out", tmp_path / "cache", "--steps", 1), code=1)
    assert "not enough memory to encode" in report and "airplane.png at 64x64; lower `resolution`" in report


def test_a_sample_that_fails_does_not_end_the_run(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("inweave.generate.drawing.denoise", short)
    sampled = ("--set", "sample_every=1", "--set", "sample_prompts=cat")
    invoked(*quick(tmp_path, cache, "--steps", 1, *sampled))
    records = [json.loads(line) for line in (tmp_path / "lora.jsonl").read_text().splitlines()]
    assert [record.get("event") for record in records] == [None, "sample failed", "finished"]
    assert "sample_prompts" in invoked(*quick(tmp_path / "b", cache, "--steps", 1, "--set", "sample_every=1"), code=2)


# signals, in a real process: the unchanged command with the smallest of tasks

PROGRAM = """
import time
from tests.forked import ForkedProcess, fork_program
from tests.unit.training.tiny import TinyTask, make_run
from inweave.training import session
loss = TinyTask.loss
TinyTask.loss = lambda self, inputs: (time.sleep(0.02), loss(self, inputs))[1]
session.train = lambda config, on_record=None, on_progress=None: make_run(config).train(on_record=on_record)
from inweave.cli.app import app
app()
"""


def process(output: Path, *more: str) -> ForkedProcess:
    arguments = ["train", "-m", "tiny", "-d", "-", "-o", str(output), "--name", "t", "--steps", "60",
                 "--save-every", "1", "-b", "2", "--rank", "2", "--lr", "0.05", "--set", 'targets=["to_q", "to_k"]',
                 "--set", "dialect=peft", "--set", "save_dtype=fp32", "--set", "precision=fp32",
                 "--set", "log_every=1", *more]  # fmt: skip
    return fork_program(PROGRAM, *arguments)


def after_steps(output: Path, running: ForkedProcess) -> None:
    deadline = time.monotonic() + 120
    while not (output / "t-state" / "step-000003").exists() and not checkpoints(output / "t-state")[3:]:
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.01)


def logged_steps(text: str) -> list[int]:
    """The steps of the lines that training prints without a terminal; any other line than its start is an error."""
    text = text.removeprefix("starting\n")
    line_of_step = re.compile(r"(\d+)/60  loss \d+\.\d{4}  average \d+\.\d{4}  lr 5\.00e-02(  \d+(\.\d+)? it/s)?")
    matches = [(line, line_of_step.fullmatch(line)) for line in text.splitlines()]
    assert not [line for line, match in matches if match is None], text
    return [int(match[1]) for _, match in matches if match is not None]


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (100, [7])])
def test_off_a_terminal_there_is_a_line_per_log_every(
    every: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one at the end, whatever the interval."""
    monkeypatch.setattr(
        session, "train", lambda config, on_record=None, **_: make_run(config).train(on_record=on_record)
    )
    output = invoked("-m", "tiny", "-d", "-", "-o", tmp_path, "--steps", 7, "-b", 2, "--rank", 2, "--set",
                     'targets=["to_q", "to_k"]', "--set", "dialect=peft", "--set", "precision=fp32", "--set",
                     f"log_every={every}")  # fmt: skip
    assert [int(step) for step in re.findall(r"^(\d+)/7  loss \d", output, re.MULTILINE)] == steps, output


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_saves_and_says_how_to_resume(number: signal.Signals, tmp_path: Path) -> None:
    running = process(tmp_path)
    after_steps(tmp_path, running)
    running.send_signal(number)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err  # `train && generate` must not go on without the file
    assert "stopped on request; continue with --resume" in out
    step = load_state(checkpoints(tmp_path / "t-state")[0]).step
    assert 3 <= step < 60
    assert logged_steps(err) == list(range(1, step + 1)), "a line per step, and nothing else"
    if number == signal.SIGINT:
        again = process(tmp_path, "--resume", "auto")
        out, err = again.communicate(timeout=300)
        assert again.returncode == 0 and "all steps are done" in out, err
        first, _, others = err.removeprefix("starting\n").partition("\n")
        assert first == f"resumed: from step {step}" and logged_steps(others) == list(range(step + 1, 61))
        straight = tiny(tmp_path / "straight", steps=60).train()
        assert file_bits(tmp_path / "t") == file_bits(straight.path)


def test_two_signals_stop_now_with_130(tmp_path: Path) -> None:
    running = process(tmp_path, "--json")
    after_steps(tmp_path, running)
    running.send_signal(signal.SIGINT)
    time.sleep(0.002)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert "Traceback" not in err
    answer = json.loads(out)
    assert running.returncode == 130 and not answer["ok"]
    if "error" in answer:
        assert "continue with --resume" in answer["error"]
    else:  # the step and the file were faster than the second signal
        assert answer["reason"] == "stopped on request"
    assert load_state(checkpoints(tmp_path / "t-state")[0]).step >= 3
