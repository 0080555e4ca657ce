"""Several processes on one machine: the same adapter as one, and one launcher for all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from inweave.cli import launch as launcher
from inweave.cli.app import app
from inweave.models.embedded import style_folder
from inweave.training.checkpoint.store import checkpoints, load_state
from inweave.training.distributed.env import LOST
from tests.forked import run_forked
from tests.unit.training.tiny import EVERYTHING, file_bits, tiny

#: what each process runs: it records the batches it sampled, and only the first one may write
WORKER = """
import json, sys
from pathlib import Path
from tests.unit.training import tiny
from tests.e2e.ranks import run_ranks
from inweave.training import loop as run
from inweave.training.checkpoint import resume as resuming
from inweave.training.distributed.world import join
output, settings = Path(sys.argv[1]), json.loads(sys.argv[2])

def work():
    world = join("cpu")
    if not world.first:
        def never(*_, **__):
            raise AssertionError("only the first process writes")
        run.save_state = run.save_adapter = run.TrainLog = resuming.recover = resuming.lock = never
    task = tiny.tiny(output, world=world, **settings)
    report = task.train()
    validating = task.task.held_out
    (output / f"drawn-{world.rank}.json").write_text(json.dumps(
        [report.losses, report.validation, [batch for batch in task.task.sampled_batches if batch not in validating]]))
    world.leave()

run_ranks(work)
"""


def test_two_processes_are_one_with_twice_the_accumulation(tmp_path: Path) -> None:
    """Of two numbers the sum is the same in any order, so here every bit is."""
    settings = {**EVERYTHING, "gradient_accumulation": 1, "validation_split": 0.2, "save_every": 3}
    one = tiny(tmp_path / "one", **{**settings, "gradient_accumulation": 2})
    report = one.train()
    (tmp_path / "two").mkdir()
    started = run_forked(WORKER, str(tmp_path / "two"), json.dumps(settings), folder=tmp_path)
    assert started.returncode == 0, started.stderr[-3000:]
    assert file_bits(tmp_path / "two" / "t") == file_bits(report.path)
    reports = [json.loads((tmp_path / "two" / f"drawn-{rank}.json").read_text()) for rank in (0, 1)]
    for losses, validation, _ in reports:
        assert losses == report.losses and [tuple(each) for each in validation] == report.validation
    sampled = [batch for batch in one.task.sampled_batches if batch not in one.task.held_out]
    first, second = ([tuple(batch) for batch in batches] for *_, batches in reports)
    assert [batch for pair in zip(first, second, strict=True) for batch in pair] == sampled, (
        "each has its half, none has both"
    )
    state = [load_state(checkpoints(tmp_path / name / "t-state")[0]).tensors for name in ("one", "two")]
    assert all(state[0][name].equal(state[1][name]) for name in state[0])
    again = tiny(
        tmp_path / "on",
        **{**settings, "gradient_accumulation": 2},
        resume=str(tmp_path / "two" / "t-state" / "step-000003"),
    )
    assert again.train().losses == report.losses[3:], "one process resumes what two started"


# the real command on the embedded model, by every launcher


BIN = Path(sys.executable).parent
INWEAVE = [str(BIN / "inweave")] if (BIN / "inweave").is_file() else [sys.executable, "-m", "inweave"]
LAUNCHERS = {
    "inweave": (INWEAVE, ["--gpus", "2"]),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "inweave"], []),
    "accelerate": (  # with --cpu it would start one process, unless there is an MPI
        [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
         "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "inweave"], []),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def arguments(cache: Path) -> list[str]:
    return [
        "train", "-m", "inweave/emoji", "-d", str(style_folder("ink")), "--rank", "2", "--steps", "2", "-b", "2",
        "--json",
        "--set", "device=cpu", "--set", "resolution=64", "--set", 'targets=["to_q"]', "--set", "save_dtype=fp32",
        "--set", f"cache_dir={cache}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def single(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process makes that adds up twice as many batches."""
    output = tmp_path_factory.mktemp("one")
    process = CliRunner().invoke(app, [*arguments(cache), "--set", "gradient_accumulation=2", "-o", str(output)])
    assert process.exit_code == 0, process.output
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@pytest.mark.parametrize(
    "launcher", [name if name == "inweave" else pytest.param(name, marks=pytest.mark.full) for name in LAUNCHERS]
)
def test_every_launcher_makes_the_adapter_of_one_process(
    launcher: str, single: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    """The same bits as one process with twice the accumulation, so also the same as each other."""
    before, after = LAUNCHERS[launcher]
    process = subprocess.run(
        [*before, *arguments(cache), *after, "-o", str(tmp_path / "two")], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout)  # one process speaks
    assert report["losses"] == single["losses"] and report["step"] == 2
    two, one = (load_file(each["path"]) for each in (report, single))
    assert two.keys() == one.keys() and all(two[name].equal(one[name]) for name in two)
    lines = (tmp_path / "two" / "lora.jsonl").read_text().splitlines()
    assert len(lines) == 2, "one process keeps the log"


# only the launcher: a package of the same name replaces the real one


@pytest.fixture
def standing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "inweave"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher, "GRACE", 1.0)
    return package / "__main__.py"


def test_every_process_knows_its_rank(standing_in: Path, tmp_path: Path) -> None:
    standing_in.write_text(
        "import os, pathlib, sys\n"
        "said = {n: os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')}\n"
        "given = repr((said, sys.argv[1:], open(sys.argv[2]).read()))\n"
        f"pathlib.Path({str(tmp_path)!r}, said['RANK']).write_text(given)\n"
    )
    assert launcher.launch(3, "rank = 4\n", True) == 0
    reports = [eval((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert (
        [settings["RANK"] for settings, *_ in reports]
        == ["0", "1", "2"]
        == [settings["LOCAL_RANK"] for settings, *_ in reports]
    )
    assert {settings["WORLD_SIZE"] for settings, *_ in reports} == {"3"} and len(
        {settings["MASTER_PORT"] for settings, *_ in reports}
    ) == 1
    assert all(arguments[0] == "train" and arguments[2:] == ["--json"] for _, arguments, _ in reports)
    assert {text for *_, text in reports} == {"rank = 4\n"} and not Path(reports[0][1][1]).exists()


def test_a_failing_process_ends_the_others_and_its_error_is_printed(
    standing_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    standing_in.write_text(
        "import os, sys, time\n"
        "print('working', os.environ['RANK'])\n"
        "if os.environ['RANK'] == '1':\n    print('error: no memory', file=sys.stderr)\n    sys.exit(1)\n"
        "time.sleep(100)\n"
    )
    started = time.monotonic()
    assert launcher.launch(2, "", False) == 1
    assert time.monotonic() - started < 30
    assert "error: no memory" in capfd.readouterr().err


def test_the_cause_is_printed_even_if_the_first_process_ends_because_of_it(
    standing_in: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    standing_in.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        f"    print('another has ended', file=sys.stderr)\n    sys.exit({LOST})\n"
        "time.sleep(0.5)\nprint('error: THE REASON', file=sys.stderr)\nsys.exit(1)\n"
    )
    assert launcher.launch(2, "", False) == 1
    assert "error: THE REASON" in capfd.readouterr().err


def test_an_error_of_every_process_is_printed_once(standing_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    standing_in.write_text("import sys\nprint('error: no such folder', file=sys.stderr)\nsys.exit(2)\n")
    assert launcher.launch(3, "", False) == 2
    assert capfd.readouterr().err.count("no such folder") == 1


def test_no_process_imports_from_the_folder_it_runs_in(
    standing_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a process that such a process starts."""
    standing_in.write_text(
        "import subprocess, sys, typer\nsubprocess.run([sys.executable, '-m', 'typer'], check=False)\n"
    )
    dataset = tmp_path / "dataset"
    (dataset / "inweave").mkdir(parents=True)
    for name in ("typer.py", "inweave/__init__.py", "inweave/__main__.py", "sitecustomize.py"):
        (dataset / name).write_text(f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'hijacked').touch()\n")
    monkeypatch.chdir(dataset)
    assert launcher.launch(1, "", False) == 0
    assert not (tmp_path / "hijacked").exists()


@pytest.mark.parametrize(("sent", "received"), [("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_a_signal_reaches_each_process_once(standing_in: Path, tmp_path: Path, sent: str, received: str) -> None:
    """A terminal that is closed ends them as kindly as a Ctrl-C: they would not notice by themselves."""
    standing_in.write_text(
        "import os, pathlib, signal, time\n"
        "seen = []\n"
        f"signal.signal(signal.{received}, lambda *_: seen.append(1))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'up-' + os.environ['RANK']).touch()\n"
        "while not seen:\n    time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'seen-' + os.environ['RANK']).write_text(str(len(seen)))\n"
    )

    def ask() -> None:
        while len(list(tmp_path.glob("up-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, sent))

    threading.Thread(target=ask).start()
    assert launcher.launch(2, "", False) == 0
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
