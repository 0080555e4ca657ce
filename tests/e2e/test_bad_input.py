"""The command line with files that are not adapters: one line, exit code 2, no traceback; nothing runs or blocks."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from tests.bad_files import BAD, PAIR, PAIR_BYTES, executed, good_file, pack, peft_directory, without_root
from tests.e2e.commands import in_process as inweave

VERBS = ("inspect", "check", "hash", "convert")
#: the protocols differ in one branch only, which the unit tests walk through
KINDS = [kind for kind in BAD if not kind.startswith(("pickle-", "payload-")) or kind in (
    "pickle-2-pt", "pickle-0-renamed", "pickle-4-renamed", "payload-1-renamed")]  # fmt: skip
#: variations of other kinds: one verb each
VARIED = (
    "shard-",
    "config-",
    "torch-old-",
    "torch-zip-renamed",
    "under-",
    "socket",
    "device",
    "trailing-",
    "noise",
    "cut-in-h",
)
FAILING = [
    [(verb, kind) for verb in (("check",) if kind.startswith(VARIED) else VERBS) if verb not in BAD[kind].accepted_by]
    for kind in KINDS
]
#: every kind with one verb, each verb in turn; the other pairs with --full
PAIRS = [
    pytest.param(*pair, marks=() if number == row % len(pairs) else pytest.mark.full)
    for row, pairs in enumerate(FAILING)
    for number, pair in enumerate(pairs)
]


#: a reader that waits for them would wait forever; a process is given up
WAITING = ("named-pipe", "socket", "device")


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inweave", *map(str, arguments)]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONUTF8": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )


def run_on(kind: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return process(*arguments) if kind in WAITING else inweave(*arguments)


def arguments(verb: str, path: Path, out: Path) -> list[object]:
    return {
        "inspect": ["inspect", path],
        "check": ["check", path, "--base", "sd1.5"],
        "hash": ["hash", path],
        "convert": ["convert", path, out, "--to", "kohya", "--base", "sd1.5"],
    }[verb]


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the error, after checking that nothing else was printed."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.endswith("\n")
    assert result.stderr[:-1].isprintable(), result.stderr
    return result.stderr[len("error: ") : -1]


@pytest.mark.parametrize(("verb", "kind"), PAIRS)
def test_one_line_and_exit_code_2(verb: str, kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    folder.mkdir()
    path = BAD[kind].make(folder)
    message = one_line(run_on(kind, *arguments(verb, path, out)))
    assert str(path.parent) in message
    if verb != "hash" or path.suffix == ".safetensors":  # a hash is of one file; for a directory the message says so
        assert BAD[kind].message in message
    assert list(tmp_path.iterdir()) == [folder]  # nothing was written
    assert not executed(folder)


@pytest.mark.parametrize("verb", VERBS)
def test_a_process_ends_as_the_command_does(verb: str, tmp_path: Path) -> None:
    """Run real processes; the other tests run in this one, except with named pipes and the like."""
    path = BAD["cut-in-data"].make(tmp_path)
    for more in ((), ("--json",)):
        command = [*arguments(verb, path, tmp_path / "out.safetensors"), *more]
        ended, returned = process(*command), inweave(*command)
        assert ended.returncode == returned.returncode == 2
        assert (ended.stdout, ended.stderr) == (returned.stdout, returned.stderr)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["missing", "cut-in-data", "pickle-0-renamed", "named-pipe", "dunder-name"])
def test_json_has_the_error(verb: str, kind: str, tmp_path: Path) -> None:
    path = BAD[kind].make(tmp_path)
    result = run_on(kind, *arguments(verb, path, tmp_path / "out.safetensors"), "--json")
    assert result.returncode == 2
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert BAD[kind].message in document["error"]
    assert str(path) in document["error"]


def test_a_folder_with_bad_files_reports_each(tmp_path: Path) -> None:
    good_file(tmp_path / "good.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"<html>")
    (tmp_path / "worse.safetensors").write_bytes(b"")
    result = inweave("inspect", tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 2
    assert "good.safetensors" in result.stdout
    printout = inweave("inspect", tmp_path, "--json")
    rows = {Path(row["path"]).stem: row for row in json.loads(printout.stdout)}
    assert printout.returncode == 2 and printout.stderr == ""
    assert "web page" in rows["bad"]["error"] and "empty" in rows["worse"]["error"]
    assert rows["good"]["tensors"] == 2 and "error" not in rows["good"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_without_read_permission(verb: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        folder = Path(name)
        folder.chmod(0o777)
        path = good_file(folder / "x.safetensors")
        command = [str(each) for each in arguments(verb, path, folder / "out.safetensors")]
        assert CliRunner().invoke(app, command).exit_code in (0, 1)  # and everything is imported
        (folder / "out.safetensors").unlink(missing_ok=True)
        path.chmod(0)
        with without_root():
            result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "Permission denied" in result.stderr and result.stdout == ""


# -- the base


def test_an_unknown_base_lists_the_known_ones(tmp_path: Path) -> None:
    path = good_file(tmp_path / "x.safetensors")
    for verb in (["check", path], ["convert", path, tmp_path / "out.safetensors", "--to", "kohya"]):
        message = inweave(*verb, "--base", "sd15.0")
        assert message.returncode == 2, verb[0]
        assert "'sd15.0'" in message.stderr and len(message.stderr.splitlines()) == 1
        for name in ("sd1.5", "sd2.1", "sdxl", "sd3.5-large", "flux1-dev"):
            assert name in message.stderr
    document = json.loads(inweave("check", path, "--base", "sd15.0", "--json").stdout)
    assert "flux1-dev" in document["error"]


def test_a_check_needs_a_base(tmp_path: Path) -> None:
    result = inweave("check", good_file(tmp_path / "x.safetensors"))
    assert result.returncode == 2
    assert "--base" in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "kind", ["missing", "directory-without", "torch-zip-pt", "named-pipe", "cut-in-header", "shard-outside"]
)
def test_a_base_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    base = BAD[kind].make(folder)
    message = one_line(run_on(kind, "check", good_file(tmp_path / "x.safetensors"), "--base", base))
    assert str(folder) in message
    assert not executed(folder)


@pytest.mark.parametrize(
    "arguments",
    [[], ["inspect"], ["unknown"], ["check", "--values", "some", "--base", "sd1.5", "x"], ["convert", "x"],
     ["hash", "--nope", "x"], ["convert", "x", "y", "--to", "nothing"], ["generate", "a", "--model", ""]],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)  # fmt: skip
def test_bad_usage(arguments: list[str]) -> None:
    result = inweave(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "out", ["file/out.safetensors", "file/missing/out.safetensors", "folder.safetensors", "out.bin"]
)
def test_an_output_that_cannot_be_written(out: str, tmp_path: Path) -> None:
    module = "lora_unet_conv_in"
    header = {
        f"{module}.lora_down.weight": {"dtype": "F32", "shape": [1, 4, 3, 3], "data_offsets": [0, 144]},
        f"{module}.lora_up.weight": {"dtype": "F32", "shape": [320, 1, 1, 1], "data_offsets": [144, 1424]},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(header, bytes(1424)))
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.safetensors").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert str(tmp_path / out) in one_line(
        inweave("convert", path, tmp_path / out, "--to", "diffusers", "--base", "sd1.5")
    )
    assert sorted(tmp_path.rglob("*")) == before


# -- the contents of a file are data


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_x.__class__.__init__.__globals__.lora_up.weight",
        "__class__.lora_up.weight",
        "diffusion_model.__dict__.lora_up.weight",
        "base_model.model.__reduce__.lora_A.weight",
    ],
)
def test_names_with_double_underscores_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, bytes(4)))
    for verb in ("inspect", "check"):
        assert repr(name) in one_line(inweave(*arguments(verb, path, tmp_path / "out.safetensors")))


def test_names_are_only_looked_up(tmp_path: Path) -> None:
    """Attributes that any module object has are not modules of a base: they end up unplaced, exit code 1."""
    names = (
        "forward", "to", "state_dict", "load_state_dict", "_modules", "parameters", "conv_in.forward", "train.apply",
        "conv_in.weight.data", "eval", "os.system", "../../etc/passwd", "{x}", "%s", "$(id)", "conv_in;id", "a b",
    )  # fmt: skip
    header: dict[str, object] = {}
    position = 0
    for name in names:
        for suffix, shape in (("lora_down.weight", [1, 4]), ("lora_up.weight", [4, 1])):
            offsets = [position, position + 16]
            header[f"diffusion_model.{name}.{suffix}"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            position += 16
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(header, struct.pack("<f", 1.0) * (position // 4)))
    result = inweave("check", path, "--base", "sd1.5", "--json")
    assert result.returncode == 1 and result.stderr == ""
    document = json.loads(result.stdout)
    assert document["placed"] == 0 and document["ok"] is False
    assert {key for row in document["unplaced"] for key in row["keys"]} == set(header)
    printout = inweave("check", path, "--base", "sd1.5")
    assert printout.returncode == 1 and "does not fit" in printout.stdout and printout.stderr == ""
    assert list(tmp_path.iterdir()) == [path]


def test_text_from_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\u202eevil\n\nfake line"
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({"__metadata__": {"ss_output_name": evil, "modelspec.title": evil}, **PAIR}, PAIR_BYTES))
    for verb in (("inspect", path), ("check", path, "--base", "sd1.5"), ("hash", path)):
        result = inweave(*verb)
        assert result.returncode in (0, 1)
        assert result.stdout.replace("\n", "").isprintable()
        assert "\nfake line" not in result.stdout
    assert json.loads(inweave("inspect", path, "--json").stdout)["training"]["name"] == evil


def test_an_error_is_one_printable_line_whatever_the_file_says(tmp_path: Path) -> None:
    evil = "A\x1b[31m\nB"
    directory = peft_directory(tmp_path / "peft", {"peft_type": evil, "lora_alpha": 1})
    one_line(inweave("inspect", directory))
    strange = tmp_path / f"x{evil}.safetensors"
    strange.write_bytes(b"")
    one_line(inweave("inspect", strange))


def test_the_json_is_json_whatever_the_metadata_says(tmp_path: Path) -> None:
    """Deep, huge and not-a-number values in a trainer's metadata: RFC 8259 on stdout, no traceback."""
    message = {
        "ss_network_args": '{"a": NaN, "b": Infinity}', "ss_steps": "[" * 100_000, "ss_network_dim": "²", "unet": "5",
        "ss_tag_frequency": '{"a": {"b": 1e999}}', "modelspec.title": "{" * 50_000,
        "ss_resolution": "[" + "9" * 5000 + "]",
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({"__metadata__": message, **PAIR}, PAIR_BYTES))
    result = inweave("inspect", path, "--json")
    assert result.returncode == 0, result.stderr[-500:]

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    assert json.loads(result.stdout, parse_constant=refuse)["tensors"] == 2
