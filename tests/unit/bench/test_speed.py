"""`inweave bench kernels` and `step`: figures of the same work, with all that is needed to repeat them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from inweave.bench import bench as benches
from inweave.bench import step as stepping
from inweave.bench import train_command
from inweave.bench.clocks import ClockLog, clock_note
from inweave.bench.generate import GenerateCase, peer_seconds
from inweave.bench.kernel_cases import GROUPS, KernelCase
from inweave.bench.kernels import largest_error
from inweave.bench.memory import measure_memory
from inweave.bench.operations import forward_operations, step_operations
from inweave.bench.report import BenchReport, BenchRow, figure, make_report, table
from inweave.bench.step import LISTED, PEER, StepCase, measure_step, our_step, peer_step, step_config, step_limit
from inweave.bench.swap import LARGEST, measure_swap, slower
from inweave.bench.timing import Rates, quantiles, wall_seconds
from inweave.bench.train_command import run_command, write_images
from inweave.cli.app import app
from inweave.cli.bench_report import print_table
from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.data.reader import read_dataset
from tests.peers import tiny_models

CPU = torch.device("cpu")
EMOJI = StepCase("inweave/emoji", batch=2, rank=4, size=64, graph="off")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "250"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_kernels_print_a_table_and_write_a_report(tmp_path: Path) -> None:
    code, output = run("kernels", "--tiny", "--device", "cpu", "--json", str(tmp_path / "k.json"))
    assert code == 0, output
    document: dict[str, Any] = json.loads((tmp_path / "k.json").read_text())
    assert document["command"] == "inweave bench kernels --tiny --device cpu"
    assert document["versions"]["torch"] == torch.__version__ and document["machine"]["threads"] >= 1
    assert document["date"].count("-") == 2
    for row in document["rows"]:
        assert row["name"] in output
        assert row["ratio"] == pytest.approx(row["peers"]["torch"] / row["ours"]) and row["limit"] > 0
    assert len(BenchReport.read(tmp_path / "k.json").rows) == len(document["rows"]) >= 5


@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_computes_the_same_as_its_peer(group: str) -> None:
    for case in GROUPS[group](CPU, torch.float32, tiny=True):
        assert isinstance(case, KernelCase) and case.traffic > 0
        exact = case.exact()
        for outputs in case.outputs.values():
            assert largest_error(outputs(), exact) < 1e-5, case.name
        assert case.outputs.keys() == {"inweave", *case.peers}


def test_unknown_kernels_are_an_error() -> None:
    code, output = run("kernels", "lorra", "--tiny", "--device", "cpu")
    assert code == 2 and "'lorra'; choose from lora" in output


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    locked = tmp_path / "file" / "k.json"
    locked.parent.write_text("no folder")
    for file, message in (
        (tmp_path, "is a folder; name a file in it"),
        (other, "already exists and is not a benchmark report"),
        (locked, "is not a folder"),
    ):
        code, output = run("kernels", "lora", "--tiny", "--device", "cpu", "--json", str(file))
        assert code == 2 and message in " ".join(output.split()) and "LoRA backward" not in output, output
    assert other.read_text() == "mine"


def test_a_report_gets_its_folder_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "new" / "k.json"
    for _ in range(2):
        code, output = run("kernels", "lora", "--tiny", "--device", "cpu", "--json", str(file))
        assert code == 0 and BenchReport.read(file).bench == "kernels", output


def test_json_goes_to_standard_output_instead_of_the_table() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "lora", "--tiny", "--device", "cpu", "--json", "-"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["command"] == "inweave bench kernels lora --tiny --device cpu"
    failed = CliRunner().invoke(app, ["bench", "kernels", "lorra", "--device", "cpu", "--json", "-"])
    assert failed.exit_code == 2 and "lorra" in json.loads(failed.stdout)["error"]


def test_options_without_an_effect_are_refused() -> None:
    for arguments, message in (
        (["step", "--train", "20", "--peers-compiled"], "--peers-compiled has no effect with --train"),
        (["step", "--no-peers", "--peers-compiled"], "--peers-compiled has no effect with --no-peers"),
        (["swap", "--size", "64"], "--size has no effect without --unmerged"),
    ):
        code, output = run(*arguments)
        assert code == 2 and message in " ".join(output.split()), output


def test_a_missing_peer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "missing_peer", lambda: "peft")
    code, output = run("step", "--size", "64", "--rank", "2", "--steps", "1", "--warmup", "1", "--device", "cpu")
    assert code == 0 and f"{PEER}: not measured, since peft is not installed" in output, output
    assert "limits: " in output


def test_a_model_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "device_memory", lambda device: {"total_bytes": 1 << 30})
    code, output = run("step", "--model", "sdxl", "--device", "cpu")
    assert code == 2, output
    assert "sdxl: its weights alone take 9.6 GiB in float32, and cpu has 1.0 GiB" in " ".join(output.split())


def test_running_out_of_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stepping, "ready_step", exhausted)
    code, output = run("step", "--size", "64", "--no-peers", "--device", "cpu")
    assert code == 2 and "not enough memory to measure this; lower --batch, --size or --rank" in output


def test_a_table_that_is_too_wide_is_a_list_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    lines = table([BenchRow("a long name", "ms", 2.0, {"peer": 3.0}, None, {"x": 1.0}), BenchRow("b", "ms", 1.0)])
    print_table(lines, 200)
    wide = capsys.readouterr().out.splitlines()
    print_table(lines, 30)
    assert len(wide) == 3 and wide == [line for line in wide if len(line) < 60]
    assert capsys.readouterr().out.splitlines() == [
        "  a long name (ms)", "    inweave         2", "    peer            3", "    peer / inweave  1.5",
        "    x               1", "  b (ms)", "    inweave         1",
    ]  # fmt: skip


def test_a_step_and_its_peer_do_the_same_work() -> None:
    """The same weights, batch and modules: adapters start at zero, so the first losses are equal."""
    ours, modules = our_step(EMOJI, CPU, torch.float32, runs=1, warmup=1)
    peer = peer_step(EMOJI, CPU, torch.float32, modules, "eager", runs=1, warmup=1)
    assert ours.loss == pytest.approx(peer.loss, rel=1e-5) and ours.loss > 0 and not ours.notes
    assert all(name.rpartition(".")[2] in ("to_q", "to_k", "to_v", "0") for name in modules) and len(modules) > 20
    assert ours.peak is None and 0 < ours.low <= ours.median <= ours.high


def test_a_step_is_reported_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    code, output = run("step", "--size", "64", "--rank", "2", "--steps", "2", "--warmup", "1", "--device", "cpu",
                       "--gradient-checkpointing", "full", "--no-peers", "--json", str(file))  # fmt: skip
    assert code == 0, output
    report = BenchReport.read(file)
    assert report.command == (
        "inweave bench step --rank 2 --size 64 --gradient-checkpointing full --steps 2 --warmup 1 --no-peers "
        "--device cpu"
    )
    (row,) = report.rows
    assert row.name == "inweave/emoji, batch 1, 64 pixels, rank 2 on attention, checkpointing full, eager"
    assert row.unit == "ms" and not row.peers and row.limit is not None
    assert row.limit < row.ours and row.details.keys() == {"10 %", "90 %"}
    assert not [note for note in report.notes if "work" in note], report.notes


def test_the_command_is_compared_with_the_step(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    code, output = run("step", "--train", "20", "--size", "64", "--rank", "2", "--steps", "2", "--device", "cpu",
                       "--json", str(file))  # fmt: skip
    assert code == 0, output
    report = BenchReport.read(file)
    (row,) = report.rows
    assert (
        report.bench == "train"
        and row.name == "inweave train, inweave/emoji, batch 1, 64 pixels, rank 2 on attention, eager"
    )
    assert row.details["steps"] == "2 to 20" and row.details["times the step"] == pytest.approx(
        row.ours / float(row.details["step alone"] or 0)
    )
    assert any("8 images encoded" in note for note in report.notes), report.notes


def test_a_command_that_fails_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(InweaveError, match=r"exit code 2: .*rank"):
        run_command("inweave/emoji", tmp_path, 20, {"dataset": "-", "rank": 0})


def test_a_command_that_takes_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "PATIENCE", 0.01)
    with pytest.raises(InweaveError, match=r"20 steps did not finish within 0\.01 s; measure fewer"):
        run_command("inweave/emoji", tmp_path, 20, {"dataset": "-"})


def test_the_dataset_of_the_command_has_a_caption_for_every_image(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 64)
    dataset = read_dataset(str(tmp_path / "images"))
    assert [example.captions for example in dataset.examples] == [(f"image number {n}",) for n in range(8)]


def test_fp8_has_no_limit_from_the_rate_of_bf16() -> None:
    rates = Rates(1e12, 1e12)
    assert step_limit(EMOJI, torch.float32, rates) == pytest.approx(
        step_operations("inweave/emoji", 2, 64, torch.float32) / 1e9
    )
    assert step_limit(StepCase("inweave/emoji", quantize="fp8"), torch.float32, rates) is None


def test_listed_targets_are_those_of_the_flux_script() -> None:
    assert step_config(StepCase("flux1-dev", targets="listed"), CPU, torch.float32).targets == LISTED
    assert StepCase("flux1-dev", targets="listed").name.endswith("rank 32 on listed, CUDA graph")


def test_a_peer_that_fails_or_does_other_work_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    other, failing = stepping.StepFigures(1.0, 1.0, 1.0, None, 123.0), RuntimeError("cuDNN\nsaid no")

    def peer(case: StepCase, device: Any, dtype: Any, modules: Any, kind: str, **_: Any) -> stepping.StepFigures:
        if kind == "compiled":
            raise failing
        return other

    monkeypatch.setattr(stepping, "peer_step", peer)
    rows, notes = measure_step(
        EMOJI, CPU, torch.float32, Rates(1e12, 1e12), runs=1, warmup=1, peers=("eager", "compiled")
    )
    assert rows[0].peers == {f"{PEER}, eager": 1000.0}
    assert f"{PEER}, compiled: RuntimeError: cuDNN said no" in notes
    assert any("not the same work: its first loss is 123" in note for note in notes)


def test_bad_requests_are_one_line() -> None:
    for arguments, message in (
        (["--model", "sdlx"], "no model of this name can be measured: 'sdlx'"),
        (["--size", "61"], "multiples of 8"),
        (["--graph", "on"], "only NVIDIA GPUs have CUDA graphs"),
        (["--compile", "on"], "blocks are compiled for NVIDIA GPUs"),
        (["--quantize", "fp8"], 'quantize = "fp8"'),
        (["--targets", "to_z"], "to_z"),
    ):
        code, output = run("step", "--device", "cpu", "--no-peers", *arguments)
        assert code == 2 and message in " ".join(output.split()), output


def test_operations_of_a_step_are_those_of_the_layers() -> None:
    one = step_operations("inweave/emoji", 2, 64, torch.float32)
    assert step_operations("inweave/emoji", 4, 64, torch.float32) == 2 * one
    # docs/benchmarks.md: an image of 20 guided steps is 70.5 GFLOP, nearly all of it the denoiser's
    forward = forward_operations("inweave/emoji", 1, 128, torch.float32)
    assert forward == pytest.approx(70.5e9 / 40, rel=0.2)
    assert 2 * forward < step_operations("inweave/emoji", 1, 128, torch.float32) < 2.2 * forward


def test_a_forward_pass_with_unmerged_loras_is_compared_with_the_base_and_the_peer(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    code, output = run("swap", "--unmerged", "--batch", "1", "--size", "64", "--rank", "2", "--runs", "1",
                       "--device", "cpu", "--json", str(file))  # fmt: skip
    assert code == 0, output
    report = BenchReport.read(file)
    assert report.bench == "unmerged" and not [note for note in report.notes if "same work" in note], report.notes
    assert [row.name.removeprefix("inweave/emoji, batch 1, 64 pixels: ") for row in report.rows] == [
        "base, eager", "1 unmerged LoRA, eager", "3 unmerged LoRAs, eager",
    ]  # fmt: skip
    base, one, three = report.rows
    for row in (one, three):
        assert row.details["times the base"] == pytest.approx(row.ours / base.ours) and row.peers[PEER] > 0


def test_images_are_measured_alone_in_a_batch_and_with_a_lora_each(tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    code, output = run("generate", "--size", "64", "--steps", "2", "--batch", "2", "--loras", "3", "--runs", "1",
                       "--device", "cpu", "--json", str(file))  # fmt: skip
    assert code == 0, output
    report = BenchReport.read(file)
    assert [row.name.removeprefix("inweave/emoji, 64 pixels, 2 steps: ") for row in report.rows] == [
        "first image", "an image", "2 images", "3 requests, a LoRA each, ranks 4 to 16",
    ]  # fmt: skip
    mixed = report.rows[-1].details
    assert mixed["times without"] == pytest.approx(report.rows[-1].ours / float(mixed["without LoRAs"] or 0))
    assert mixed["times faster"] == pytest.approx(float(mixed["one by one"] or 0) / report.rows[-1].ours)
    assert report.notes == (
        "inweave/emoji: diffusers does not read its tokenizer, so there is nothing to compare with",
    )


def test_images_of_a_peer_are_those_of_its_own_pipeline() -> None:
    case = GenerateCase("sd1.5", 64, 2, batch=2, loras=0)
    one, several, first = peer_seconds(str(tiny_models.folder("sd1.5")), case, CPU, torch.float32, "eager", 1)
    assert 0 < one < first + several and several > 0


def test_swaps_restore_the_base_and_are_compared_with_the_peers() -> None:
    rows, notes = measure_swap("inweave/emoji", 2, CPU, torch.float32, Rates(1e12, 1e10), runs=1)
    assert len(rows) == 7 and all(row.ours > 0 and row.peers[PEER] > 0 for row in rows)
    assert all(row.limit for row in rows[:5])
    for row in (*rows[:4], *rows[5:]):
        assert row.details["times plain"] == pytest.approx(row.ours / float(row.details["plain"] or 0))
    assert "inweave/emoji: rank 2 on 56 weights, 1.137 M numbers, float32" in notes
    assert any("afterwards, inweave: 0 of 7,366,440" in note for note in notes), notes


def test_rows_that_became_slower_are_named() -> None:
    """With what two versions took on one H200: the one that was too slow, and the one after it."""
    names = list(LARGEST)
    for figures, expected in (((1.5, 1.5, 2.0, 1.7, 0.90, 1.01), 3), ((1.35, 1.35, 1.37, 1.35, 0.37, 0.51), 0)):
        rows = [BenchRow(name, "ms", 1.0, {}, None, {"times plain": f}) for name, f in zip(names, figures, strict=True)]
        assert len(slower(rows)) == expected, slower(rows)
    assert slower([BenchRow(names[4], "ms", 9.0, {}, None, {"times plain": 0.9})]) == [
        "build from a file: 0.90 times the plain work, at most 0.6 are expected"
    ]
    assert not slower(BenchReport.read(Path(__file__).parents[3] / "docs" / "bench" / "swap.json").rows)


def test_activation_memory_is_predicted_and_checkpointing_saves_some() -> None:
    case = StepCase("inweave/emoji", rank=2, size=64)
    (off, full), notes = measure_memory(case, CPU, torch.float32, runs=1, modes=("off", "full"), peers=False)
    assert not notes and full.ours < 0.6 * off.ours and full.details["saved"] == pytest.approx(1 - full.ours / off.ours)
    for row in (off, full):
        assert row.details["predicted"] == pytest.approx(row.ours, rel=0.15) and row.unit == "GiB"


def test_rows_and_figures() -> None:
    row = BenchRow("a", "ms", 2.0, {"x": 3.0, "y": 5.0}, 1.0)
    assert row.ratio == 1.5 and BenchRow("b", "ms", 2.0).ratio is None
    assert table([row, BenchRow("b", "ms", 1234.5, {"y": 0.00012}, None, {"p": "q"})]) == [
        ["", "unit", "inweave", "x", "y", "limit", "peer / inweave", "p"],
        ["a", "ms", "2", "3", "5", "1", "1.5", ""],
        ["b", "ms", "1,234", "", "1.2e-04", "", "9.7e-08", "q"],
    ]
    assert [figure(value) for value in (0.0, 0.1234, 12.34, 123.4, None, "x")] == ["0", "0.123", "12.3", "123", "", "x"]
    assert quantiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 1.0, 5.0)
    calls: list[str] = []
    samples = wall_seconds(lambda: calls.append("w"), CPU, runs=2, warmup=1, before=lambda: calls.append("b"))
    assert len(samples) == 2 and "".join(calls) == "bwbwbw"
    assert Rates(10.0, 2.0).seconds(20, 1) == 2.0 and Rates(10.0, 2.0).seconds(10, 8) == 4.0


def test_a_report_survives_its_file_and_others_are_refused(tmp_path: Path) -> None:
    made = make_report(
        "step", "inweave bench step", CPU, [BenchRow("a", "ms", 1.0, {"p": 2.0}, 0.5, {"d": 1.0})], ["note"]
    )
    assert BenchReport.read(made.write(tmp_path / "a.json")) == made
    (tmp_path / "b.json").write_text('{"schema": 7}')
    (tmp_path / "c.json").write_text('{"schema": 1, "rows": [{}]}')
    for name in ("b", "c"):
        with pytest.raises(FormatError, match=f"{name}.json: .*report"):
            BenchReport.read(tmp_path / f"{name}.json")
    with pytest.raises(ConfigError, match="no model of this name"):
        step_operations("sd9", 1, 64, torch.float32)


def test_clocks_of_a_gpu_are_those_while_it_works() -> None:
    idle, work = "345, 78.4, Not Active\n", "1980, 400.0, Not Active\n1470, 694.2, Active\n1650, 690.0, Active\n"
    assert clock_note(idle + work + idle + "[N/A], [N/A], [N/A]\n19") == (
        "clock 1,650 MHz (1,470 to 1,980), at most 694 W, at the power limit in 67% of 3 samples"
    )
    assert clock_note("") is None and clock_note("no devices were found\n") is None
    with ClockLog(CPU) as clocks:
        pass
    assert clocks.note is None
