"""bake, extract and resize as a user runs them: exit codes, documented JSON, files on disk."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.errors import ConfigError
from inweave.exchange.load import load, open_base
from inweave.formats.files import read_header
from inweave.weights.stack import Strength, read_entry
from tests.support import DATA, base_listing, lora_pair, random, tensor, write, write_sparse
from tests.unit.weights.models import (
    DENOISER,
    adapter,
    bits,
    flux,
    flux_lora,
    merged_with,
    pair,
    write_file,
    write_folder,
)

TO_Q = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
LOKR = DATA / "files" / "lycoris_smart_falcon_4_lokr.safetensors"
BAKE_FIELDS = {
    "ok", "path", "base", "tensors", "merged", "bytes", "created", "left_out", "loras", "warnings", "rounding_loss",
}  # fmt: skip
EXTRACT_FIELDS = {"ok", "path", "dialect", "base", "tensors", "rank", "energy", "notes", "modules", "left_out"}
RESIZE_FIELDS = {"ok", "path", "dialect", "base", "tensors", "energy", "unchanged", "notes", "modules"}


def inweave(*arguments: str | Path, code: int = 0) -> str:
    """Run a command inside this process: everything but the start of Python."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def inweave_json(*arguments: str | Path, code: int = 0):  # type: ignore[no-untyped-def]
    return json.loads(inweave(*arguments, "--json", code=code))


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inweave", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_file(tmp_path / "base.safetensors", flux(), title="warp")


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write(tmp_path / "a.safetensors", flux_lora())


def header_only(folder: Path, name: str, listing: str) -> Path:
    """Write a checkpoint with published names and shapes, and a sparse hole for the weights."""
    return write_sparse(
        folder / f"{name}.safetensors", {n: ("F16", shape) for n, shape in base_listing(listing).items()}
    )


# bake


def test_bake_writes_the_merged_source(tmp_path: Path, base: Path, lora: Path) -> None:
    other = write(tmp_path / "b:2.safetensors", flux_lora(40))
    out = tmp_path / "out.safetensors"
    result = process(
        "bake", "--base", base, "--lora", f"{lora}:0.8", "--lora", f"{other}:unet=0.5,te=-1", "--out", out, "--json"
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    report = json.loads(result.stdout)
    assert set(report) == BAKE_FIELDS
    assert report["ok"] is True
    assert (report["path"], report["merged"], report["tensors"]) == (str(out), 7, len(flux()))
    records = [
        {"name": "a.safetensors", "sha256": hashlib.sha256(lora.read_bytes()).hexdigest(), "strength": 0.8},
        {"name": "b:2.safetensors", "sha256": hashlib.sha256(other.read_bytes()).hexdigest(),
         "strength": {"overall": 1.0, "unet": 0.5, "te": -1.0}},
    ]  # fmt: skip
    assert report["loras"] == records
    metadata = read_header(out).metadata
    assert metadata["title"] == "warp"
    assert json.loads(metadata["inweave.merged"]) == records
    stack = [
        (adapter(flux_lora()), Strength(0.8)),
        (adapter(flux_lora(40)), Strength(components={"unet": 0.5, "te": -1.0})),
    ]
    want = merged_with(flux(), open_base(base), stack)
    for name, value in load_file(out).items():
        assert bits(value) == bits(want.get(name)), name


def test_bake_for_people(base: Path, lora: Path, tmp_path: Path) -> None:
    printout = inweave("bake", "-b", base, "-l", f"{lora}:0.8", "-o", tmp_path / "out.safetensors", "--dtype", "bf16")
    for word in ("a.safetensors at 0.8", f"7 of {len(flux())} tensors", "out.safetensors"):
        assert word in printout
    dtypes = {value.dtype for value in load_file(tmp_path / "out.safetensors").values()}
    assert dtypes == {torch.bfloat16, torch.int64}


def test_bake_into_a_folder(tmp_path: Path, lora: Path) -> None:
    folder = write_folder(tmp_path / "model", flux())
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"old")
    report = inweave_json("bake", "--base", folder, "--lora", lora, "--out", tmp_path / "out")
    assert [Path(path).name for path in report["left_out"]] == ["diffusion_pytorch_model.bin"]
    for name in ("transformer/diffusion_pytorch_model", "text_encoder/model"):
        assert "inweave.merged" in read_header(tmp_path / "out" / f"{name}.safetensors").metadata
    assert (tmp_path / "out" / "model_index.json").is_file()


def test_bake_takes_the_model_inside_the_package(tmp_path: Path) -> None:
    from inweave.models.embedded import loras

    arguments = ("--base", "inweave/emoji", "--lora", f"{loras()['pixel']}:0.5", "--out", tmp_path / "out")
    assert inweave_json("bake", *arguments)["merged"] > 0
    assert (tmp_path / "out" / "unet").is_dir()


def test_bake_refuses_another_base_and_names_both(tmp_path: Path) -> None:
    sdxl = header_only(tmp_path, "xl", "sdxl_singlefile_sgm")
    out = tmp_path / "out.safetensors"
    report = inweave_json("bake", "--base", sdxl, "--lora", LOKR, "--out", out, code=1)
    assert set(report) == {"ok", "error"}
    assert "this file is for sd1.5" in report["error"]
    assert "not for sdxl" in report["error"]
    assert LOKR.name in report["error"]
    assert not out.exists()


def test_bake_refuses_what_does_not_fit(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out.safetensors"
    nothing = write(tmp_path / "n.safetensors", pair("lora_unet_nowhere", 8, 8))
    assert "nothing in this file fits" in inweave_json("bake", "-b", base, "-l", nothing, "-o", out, code=1)["error"]
    half = flux_lora() | pair("lora_unet_nowhere", 8, 8)
    report = inweave_json("bake", "-b", base, "-l", write(tmp_path / "h.safetensors", half), "-o", out, code=1)
    assert "unplaced: lora_unet_nowhere" in report["error"]
    broken = flux_lora() | {"lora_unet_final_layer_linear.lora_up.weight": tensor([[float("nan"), 1.0]] * 6)}
    report = inweave_json("bake", "-b", base, "-l", write(tmp_path / "b.safetensors", broken), "-o", out, code=1)
    assert "6 of 12 numbers are NaN" in report["error"]
    assert not out.exists()


def test_bake_bad_usage(tmp_path: Path, base: Path, lora: Path) -> None:
    out = tmp_path / "out.safetensors"
    for arguments, words in (
        (("-b", "sdxl", "-l", lora, "-o", out), "the weights themselves are needed"),
        (("-b", base, "-l", tmp_path / "gone.safetensors", "-o", out), "no such file"),
        (("-b", base, "-l", f"{lora}:much", "-o", out), "'much' is not a strength"),
        (("-b", base, "-l", f"{lora}:inf", "-o", out), "finite"),
        (("-b", base, "-l", f"{lora}:vae=1", "-o", out), "unknown component 'vae'"),
        (("-b", base, "-l", f"{lora}:te=1,te=2", "-o", out), "given twice"),
        (("-b", base, "-l", lora, "-o", base), "already exists"),
        (("-b", base, "-l", lora, "-o", base, "--force"), "the base itself"),
        (("-b", base, "-l", lora, "-o", lora, "--force"), "one of the adapters"),
        (("-b", base, "-l", lora, "-o", tmp_path / "out"), "ends in .safetensors"),
        (("-b", lora, "-l", lora, "-o", out), ""),
    ):
        code = 1 if arguments[1] == lora else 2
        report = inweave_json("bake", *arguments, code=code)
        assert report["ok"] is False
        assert words in report["error"]
        assert "\n" not in report["error"] or code == 1
    assert process("bake", "--base", base, "--out", out).returncode == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "base.safetensors"]


@pytest.mark.parametrize(
    ("text", "path", "strength"),
    [
        ("a.safetensors", "a.safetensors", Strength()),
        ("a.safetensors:0.8", "a.safetensors", Strength(0.8)),
        ("a.safetensors:-1.5e1", "a.safetensors", Strength(-15.0)),
        ("a.safetensors:unet=0.8,te=0.2", "a.safetensors", Strength(components={"unet": 0.8, "te": 0.2})),
        ("a.safetensors:te2=0", "a.safetensors", Strength(components={"te2": 0.0})),
        ("dir:with/colons:in/it.safetensors", "dir:with/colons:in/it.safetensors", Strength()),
        ("dir:with/colons.safetensors:0.5", "dir:with/colons.safetensors", Strength(0.5)),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", Strength()),
        (r"C:\loras\a.safetensors:0.5", r"C:\loras\a.safetensors", Strength(0.5)),
        ("folder:1", "folder", Strength(1.0)),
    ],
)
def test_file_and_strength(text: str, path: str, strength: Strength) -> None:
    assert read_entry(text) == (path, strength)


def test_the_name_of_an_existing_file_is_never_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:0.5").write_text("")
    assert read_entry("a:0.5") == ("a:0.5", Strength())
    assert read_entry("a:0.5:0.25") == ("a:0.5", Strength(0.25))
    Path("dir").mkdir()
    with pytest.raises(ConfigError, match="not a strength"):
        read_entry("dir:fast")


# extract


def test_extract_writes_what_was_merged(tmp_path: Path, base: Path) -> None:
    tensors = pair("lora_unet_double_blocks_0_img_attn_qkv", 24, 8, 3, alpha=2.0) | pair(
        "lora_unet_final_layer_linear", 6, 8, 2
    )
    lora = write(tmp_path / "lora.safetensors", tensors)
    tuned = tmp_path / "tuned.safetensors"
    inweave("bake", "-b", base, "-l", f"{lora}:3", "-o", tuned)
    out = tmp_path / "extracted.safetensors"
    report = inweave_json("extract", tuned, base, "--rank", "3", "--out", out, "--dtype", "fp32")
    assert set(report) == EXTRACT_FIELDS
    assert report["energy"] == pytest.approx(1, abs=1e-6)
    assert {row["name"]: row["rank"] for row in report["modules"]} == {
        "unet:double_blocks.0.img_attn.qkv.weight": 3,
        "unet:final_layer.linear.weight": 3,  # rounding of the tuned weights fills the third
    }
    assert json.loads(read_header(out).metadata["inweave.extracted"])["base"] == "base.safetensors"
    assert load(out).dialects == ("kohya",)


def test_extract_for_people_and_between_layouts(tmp_path: Path, base: Path) -> None:
    tensors = flux()
    name = f"{DENOISER}double_blocks.0.img_attn.proj"
    tensors[f"{name}.weight"] = torch.randn(8, 8)
    tensors[f"{name}.bias"] = torch.randn(8)
    tuned = write_folder(tmp_path / "tuned", tensors)
    printout = inweave("extract", tuned, base, "--rank", "2", "--out", tmp_path / "o.safetensors", "--to", "diffusers")
    for word in (
        "energy",
        "1 with rank 2",
        "left out: unet:transformer_blocks.0.attn.to_out.0.bias",
        "higher rank",
    ):
        assert word in printout
    full = inweave_json("extract", tuned, base, "--rank", "2", "--out", tmp_path / "f.safetensors", "--full-norms")
    assert {row["name"]: row["rank"] for row in full["modules"]}[f"unet:{name.removeprefix(DENOISER)}.bias"] == 0
    assert full["left_out"] == []
    assert any(key.endswith(".diff_b") for key in read_header(tmp_path / "f.safetensors").spans)


def test_extract_refuses_two_models_and_names_both(tmp_path: Path) -> None:
    one = header_only(tmp_path, "one", "sd15_singlefile_ldm")
    two = header_only(tmp_path, "two", "sd21_singlefile_ldm")
    report = inweave_json("extract", one, two, "--out", tmp_path / "o.safetensors", code=1)
    assert "one.safetensors (sd1.5) and" in report["error"]
    assert "two.safetensors (sd2.1) are different models" in report["error"]


def test_extract_bad_usage(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "o.safetensors"
    tuned = write_file(tmp_path / "tuned.safetensors", flux(1))
    for arguments, words in (
        ((tuned, tmp_path / "gone.safetensors", "-o", out), "no such file"),
        ((tuned, base, "-o", tmp_path / "o"), "one file"),
        ((tuned, base, "-o", out, "--to", "peft"), "a directory"),
        ((tuned, base, "-o", out, "--rank", "0"), "1 or more"),
        ((tuned, base, "-o", out, "--device", "quantum"), "no device is called 'quantum'"),
    ):
        assert words in inweave_json("extract", *arguments, code=2)["error"]
    assert "do not differ" in inweave_json("extract", base, base, "-o", out, code=1)["error"]
    assert not out.exists()


# resize


def test_resize_one_file(tmp_path: Path) -> None:
    big = lora_pair(TO_Q, 320, 320, rank=16, alpha=8.0) | lora_pair(
        TO_Q.replace("to_q", "to_k"), 320, 320, rank=2, seed=9, alpha=1.0
    )
    source = write(tmp_path / "a.safetensors", big, {"ss_network_dim": "16"})
    out = tmp_path / "small.safetensors"
    report = inweave_json("resize", source, "--rank", "4", "--out", out)
    assert set(report) == RESIZE_FIELDS
    assert (report["base"], report["dialect"]) == ("sd1.5", "kohya")
    assert {(row["before"], row["rank"]) for row in report["modules"]} == {(16, 4), (2, 2)}
    assert 0 < report["energy"] < 1
    entries = {entry.ref.name[-4:]: entry.factors for entry in load(out).entries}
    assert (entries["to_q"].rank, entries["to_q"].alpha) == (4, 4.0)
    assert entries["to_k"].rank == 2
    printout = inweave("resize", source, "--energy", "0.5", "--out", out, "--force")
    assert "of the squared norm is kept" in printout


def test_resize_keeps_other_kinds_of_one_file(tmp_path: Path) -> None:
    report = inweave_json("resize", LOKR, "--rank", "2", "--out", tmp_path / "o.safetensors")
    assert len(report["unchanged"]) == 350
    assert report["modules"] == []
    assert "unchanged" in inweave("resize", LOKR, "--rank", "2", "--out", tmp_path / "o.safetensors", "--force")
    report = inweave_json("resize", LOKR, f"{LOKR}:0.5", "--rank", "2", "--out", tmp_path / "p.safetensors", code=1)
    assert "350 modules cannot be combined" in report["error"]


def test_resize_combines(tmp_path: Path, base: Path) -> None:
    one = write(tmp_path / "one.safetensors", pair("lora_unet_double_blocks_0_img_attn_qkv", 24, 8, 3, alpha=2.0))
    two = write(tmp_path / "two.safetensors", pair("lora_unet_double_blocks_0_img_attn_qkv", 24, 8, 2, 30)
                | pair("lora_unet_final_layer_linear", 6, 8, 2, 40))  # fmt: skip
    out = tmp_path / "sum.safetensors"
    report = inweave_json("resize", f"{one}:0.8", f"{two}:-0.5", "--base", base, "--out", out)
    assert [row["rank"] for row in report["modules"]] == [5, 2]
    assert [row["strength"] for row in json.loads(read_header(out).metadata["inweave.combined"])] == [0.8, -0.5]


def test_resize_bad_usage(tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    sd = write(tmp_path / "sd.safetensors", lora_pair(TO_Q, 320, 320))
    xl = write(
        tmp_path / "xl.safetensors", lora_pair("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 640, 2048)
    )
    odd = write(
        tmp_path / "odd.safetensors", {"x.lora_down.weight": random(1, 2, 8), "x.lora_up.weight": random(2, 8, 2)}
    )
    for arguments, words, code in (
        ((sd, "-o", out), "--rank or --energy", 2),
        ((sd, "--rank", "0", "-o", out), "1 or more", 2),
        ((sd, "--energy", "2", "-o", out), "up to 1", 2),
        ((sd, "--rank", "2", "-o", tmp_path / "o"), "one file", 2),
        ((tmp_path / "gone.safetensors", "--rank", "2", "-o", out), "no such file", 2),
        ((sd, xl, "--rank", "2", "-o", out), "sd.safetensors is for sd1.5, xl.safetensors is for sdxl", 1),
        ((odd, "--rank", "2", "-o", out), "(--base)", 1),
        ((sd, "--base", "sdxl", "--rank", "2", "-o", out), "on sdxl", 1),
    ):
        assert words in inweave_json("resize", *arguments, code=code)["error"]
    assert not out.exists()


def test_help_names_the_verbs_and_starts_without_torch() -> None:
    result = process("--help")
    for verb in ("bake", "extract", "resize"):
        assert verb in result.stdout
        assert inweave(verb, "--help")
    program = (
        "import sys; from inweave.cli.app import app\n"
        "try:\n    app(['bake', '--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_merge_is_another_name_for_bake(base: Path, lora: Path, tmp_path: Path) -> None:
    contents = []
    for verb in ("bake", "merge"):
        out = tmp_path / f"{verb}.safetensors"
        inweave(verb, "--base", base, "--lora", lora, "--out", out)
        contents.append(out.read_bytes())
    assert contents[0] == contents[1]


def test_nothing_is_replaced_without_force(tmp_path: Path, base: Path, lora: Path) -> None:
    out, folder = tmp_path / "new" / "out.safetensors", tmp_path / "peft"
    commands: dict[str, list[str | Path]] = {
        "bake": ["bake", "--base", base, "--lora", lora, "--out", out],
        "extract": ["extract", base, base, "--out", out],
        "resize": ["resize", lora, "--rank", "2", "--base", base, "--out", out],
        "convert": ["convert", LOKR, out, "--to", "kohya"],
    }
    inweave(*commands["convert"])  # its folder is made
    before = out.read_bytes()
    for arguments in commands.values():
        error = inweave(*arguments, code=2)
        assert "already exists" in error and "--force" in error
        assert out.read_bytes() == before
    inweave(*commands["bake"], "--force")
    assert out.read_bytes() != before
    arguments = ["convert", DATA / "files" / "catundchat_sd15_pytorch_lora_weights.safetensors", folder, "--to", "peft"]
    folder.mkdir()
    inweave(*arguments)
    assert "already exists" in inweave(*arguments, code=2)
    inweave(*arguments, "--force")
