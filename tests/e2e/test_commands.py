"""The commands as a user runs them: exit codes, documented JSON; text comes from real processes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inweave.formats.files import open_container
from tests.e2e.commands import in_process
from tests.support import DATA, lora_pair, random, tensor, write

FILES = DATA / "files"
LOKR = FILES / "lycoris_smart_falcon_4_lokr.safetensors"
LISTED = FILES / "cloneofsimo_lora_disney.safetensors"
TO_Q = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def inweave(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inweave", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def inweave_json(*arguments: str | Path, code: int = 0) -> Any:
    result = in_process(*arguments, "--json")
    assert result.returncode == code, result.stdout + result.stderr
    assert not result.stderr
    return json.loads(result.stdout)


CHECK_FIELDS = {
    "ok", "error", "dialect", "algorithms", "base", "tensors", "placed", "modules", "components", "unplaced",
    "mismatched", "orphans", "duplicates", "unsupported", "nonfinite", "zeros", "carried", "warnings",
}  # fmt: skip
INSPECT_FIELDS = {
    "path", "bytes", "tensors", "dialects", "algorithms", "ranks", "alphas", "scales", "dtypes", "components",
    "modules", "kinds", "base", "triggers", "tags", "dataset", "training", "carried", "problems", "warnings", "hashes",
}  # fmt: skip


def test_help_names_every_command() -> None:
    result = inweave("--help")
    assert result.returncode == 0
    for verb in ("inspect", "check", "convert", "hash"):
        assert verb in result.stdout
        assert inweave(verb, "--help").returncode == 0
    assert inweave("--version").stdout.startswith("inweave ")
    assert inweave("no-such-verb").returncode == 2


def test_inspect_json() -> None:
    report = inweave_json("inspect", LOKR)
    assert set(report) == INSPECT_FIELDS
    assert report["tensors"] == 1750
    assert report["algorithms"] == ["lokr"]
    assert report["base"]["detected"] == "sd1.5"
    assert report["components"] == {"unet": 278, "te": 72}
    assert report["training"]["network_dim"] == "4"
    assert report["hashes"]["sha256"] == hashlib.sha256(LOKR.read_bytes()).hexdigest()
    assert report["ranks"] == {"4": 350}
    keys = inweave_json("inspect", LOKR, "--keys")["keys"]
    assert len(keys) == 1750
    assert set(keys[0]) == {"key", "dtype", "shape"}


def test_inspect_for_people_shows_the_essentials() -> None:
    result = inweave("inspect", LISTED)
    assert result.returncode == 0
    for word in ("cloneofsimo", "sd1.5", "<s1>", "autov3", "rank"):
        assert word in result.stdout


def test_inspect_a_folder_lists_every_adapter(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", lora_pair(TO_Q, 320, 320))
    write(tmp_path / "b.safetensors", lora_pair(TO_Q, 320, 320, seed=5))
    (tmp_path / "c.safetensors").write_bytes(b"")
    report = inweave_json("inspect", tmp_path, code=2)
    assert [Path(row["path"]).name for row in report] == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert "empty" in report[2]["error"]


def test_inspect_reports_trigger_words_in_order_of_trust(tmp_path: Path) -> None:
    metadata = {
        "ss_tag_frequency": json.dumps({"10_dog": {"ohwx": 12, "dog": 40}, "5_cat": {"dog": 1}}),
        "ss_dataset_dirs": json.dumps({"10_ohwx dog": {"n_repeats": 10}}),
        "modelspec.trigger_phrase": "ohwx dog, fluffy",
        "ss_network_args": json.dumps({"conv_dim": "4"}),
        "modelspec.title": "Dogs",
    }
    path = write(tmp_path / "a.safetensors", lora_pair(TO_Q, 320, 320), metadata)
    report = inweave_json("inspect", path)
    assert [row["source"] for row in report["triggers"]] == [
        "modelspec.trigger_phrase",
        "ss_dataset_dirs",
        "ss_tag_frequency",
    ]
    assert report["triggers"][0]["words"] == ["ohwx dog", "fluffy"]
    assert report["triggers"][2]["words"] == ["dog", "ohwx"]
    assert report["training"]["network_args"] == {"conv_dim": "4"}
    assert report["training"]["title"] == "Dogs"


def test_check_json_of_a_clean_file() -> None:
    report = inweave_json("check", LISTED, "--base", "sd15")
    assert set(report) == CHECK_FIELDS
    assert report["ok"] is True
    assert report["placed"] == 384
    assert report["tensors"] == 386
    assert report["carried"] == ["<s1>", "<s2>"]
    assert report["base"]["given"] == "sd1.5"
    assert report["base"]["namings"] == {"diffusers": True, "original": True}


def test_check_refuses_another_base_and_names_both() -> None:
    report = inweave_json("check", LOKR, "--base", "sdxl", code=1)
    assert report["ok"] is False
    assert "sd1.5" in report["error"]
    assert "sdxl" in report["error"]
    assert report["base"]["detected"] == "sd1.5"
    text = inweave("check", LOKR, "--base", "flux1-dev")
    assert text.returncode == 1
    assert "for sd1.5" in text.stdout
    assert "nearest" in text.stdout or "does not fit" in text.stdout


def spoilt(tmp_path: Path, **changes: Any) -> Path:
    tensors = lora_pair(TO_Q, 320, 320, alpha=2.0)
    tensors |= lora_pair(TO_Q.replace("to_q", "to_k"), 320, 320, seed=7, alpha=2.0)
    tensors |= changes
    return write(tmp_path / "spoilt.safetensors", {key: value for key, value in tensors.items() if value is not None})


def test_check_names_half_a_pair(tmp_path: Path) -> None:
    report = inweave_json("check", spoilt(tmp_path, **{f"{TO_Q}.lora_up.weight": None}), "--base", "sd1.5", code=1)
    assert len(report["orphans"]) == 1
    assert f"{TO_Q}.lora_down.weight" in report["orphans"][0]["keys"]
    assert "lora_up is missing" in report["orphans"][0]["reason"]
    assert report["placed"] == 3


def test_check_names_a_wrong_shape(tmp_path: Path) -> None:
    path = spoilt(tmp_path, **{f"{TO_Q}.lora_down.weight": random(3, 4, 640)})
    report = inweave_json("check", path, "--base", "sd1.5", code=1)
    assert report["mismatched"][0]["expected"] == [320, 320]
    assert report["mismatched"][0]["got"] == [320, 640]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_check_reports_nonfinite_values(tmp_path: Path, value: float, dtype: str) -> None:
    numbers = np.ones((4, 320), dtype=np.float32)
    numbers[2, 7] = value
    path = spoilt(tmp_path, **{f"{TO_Q}.lora_down.weight": tensor(numbers, dtype)})
    report = inweave_json("check", path, "--base", "sd1.5", code=1)
    assert report["nonfinite"] == [{"key": f"{TO_Q}.lora_down.weight", "count": 1, "of": 1280}]
    assert inweave_json("check", path, "--base", "sd1.5", "--values", "none")["ok"] is True


def test_check_reports_a_module_that_changes_nothing(tmp_path: Path) -> None:
    path = spoilt(tmp_path, **{f"{TO_Q}.lora_up.weight": tensor(np.zeros((320, 4)))})
    report = inweave_json("check", path, "--base", "sd1.5")
    assert report["zeros"] == [f"{TO_Q}.lora_up.weight"]
    assert any("zeros" in warning for warning in report["warnings"])


def test_check_reports_two_adapters_on_one_place(tmp_path: Path) -> None:
    dotted = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    again = {f"{dotted}.lora_A.weight": random(1, 4, 320), f"{dotted}.lora_B.weight": random(2, 320, 4)}
    report = inweave_json("check", spoilt(tmp_path, **again), "--base", "sd1.5", code=1)
    assert len(report["duplicates"]) == 1
    assert report["ok"] is False


def test_check_names_the_nearest_module(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.safetensors",
        lora_pair(TO_Q, 320, 320) | lora_pair(TO_Q.replace("attn1_to_q", "attn1_to_qq"), 320, 320),
    )
    report = inweave_json("check", path, "--base", "sd1.5", code=1)
    assert report["unplaced"][0]["nearest"] == "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def test_nothing_matches_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lora_pair("lora_unet_nowhere_at_all", 32, 32))
    report = inweave_json("check", path, "--base", "sd1.5", code=1)
    assert report["placed"] == 0
    assert "nothing in this file fits sd1.5" in report["error"]


def test_the_counts_add_up(tmp_path: Path) -> None:
    path = spoilt(
        tmp_path,
        **{
            f"{TO_Q}.lora_up.weight": None,
            "lora_unet_nowhere.lora_down.weight": random(1, 4, 8),
            "lora_unet_nowhere.lora_up.weight": random(1, 8, 4),
            "some.odd.key": random(1, 3),
            "bundle_emb.word.string_to_param.*": random(1, 2, 768),
            "lora_unet_conv_in.alpha": tensor(1.0),
        },
    )
    report = inweave_json("check", path, "--base", "sd1.5", code=1)
    lists = ("unplaced", "mismatched", "orphans", "duplicates", "unsupported")
    names = sum(len(row["keys"]) for kind in lists for row in report[kind])
    assert report["placed"] + names + len(report["carried"]) == report["tensors"]


def test_convert_there_and_back(tmp_path: Path) -> None:
    path = spoilt(tmp_path)
    there = inweave_json("convert", path, tmp_path / "d.safetensors", "--to", "diffusers")
    assert there["ok"] is True
    assert there["base"] == "sd1.5"
    inweave_json("convert", tmp_path / "d.safetensors", tmp_path / "k.safetensors", "--to", "kohya")
    one, two = open_container(path).tensors, open_container(tmp_path / "k.safetensors").tensors
    assert one.keys() == two.keys()
    assert all(one[key].same(two[key]) for key in one)


def test_convert_refuses_what_the_dialect_cannot_express(tmp_path: Path) -> None:
    refused = inweave("convert", LOKR, tmp_path / "out.safetensors", "--to", "diffusers")
    assert refused.returncode == 1
    assert "lokr" in refused.stderr
    assert "lora_te_text_model_encoder_layers_0_mlp_fc1" in refused.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_convert_drop_leaves_out_and_reports_it(tmp_path: Path) -> None:
    mixed = lora_pair(TO_Q, 320, 320) | {"lora_unet_conv_in.diff_b": random(1, 320)}
    path = write(tmp_path / "mixed.safetensors", mixed)
    assert inweave("convert", path, tmp_path / "out.safetensors", "--to", "diffusers").returncode == 1
    result = inweave_json("convert", path, tmp_path / "out.safetensors", "--to", "diffusers", "--drop")
    assert result["tensors"] == 2
    assert result["dropped"][0]["keys"] == ["lora_unet_conv_in.diff_b"]


def test_convert_keeps_metadata_and_needs_a_known_base(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lora_pair("lora_unet_unknown_thing", 8, 8), {"ss_output_name": "x"})
    result = inweave("convert", path, tmp_path / "b.safetensors", "--to", "comfy")
    assert result.returncode == 1
    assert "which base model" in result.stderr
    path = write(tmp_path / "c.safetensors", lora_pair(TO_Q, 320, 320), {"ss_output_name": "x", "custom": "é"})
    inweave_json("convert", path, tmp_path / "d.safetensors", "--to", "comfy", "--base", "sd1.5")
    assert {"ss_output_name": "x", "custom": "é"}.items() <= open_container(tmp_path / "d.safetensors").metadata.items()


def test_convert_to_peft_is_a_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lora_pair(TO_Q, 320, 320, alpha=2.0))
    assert inweave("convert", path, tmp_path / "out.safetensors", "--to", "peft").returncode == 2
    inweave_json("convert", path, tmp_path / "out", "--to", "peft")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 2)
    assert inweave_json("check", tmp_path / "out", "--base", "sd1.5")["ok"] is True


def test_hash_matches_its_definitions(tmp_path: Path) -> None:
    report = inweave_json("hash", LISTED)
    raw = LISTED.read_bytes()
    body = raw[8 + int.from_bytes(raw[:8], "little") :]
    assert report["sha256"] == hashlib.sha256(raw).hexdigest()
    assert report["autov1"] == hashlib.sha256(raw[0x100000:0x110000]).hexdigest()[:8]
    assert report["autov2"] == report["sha256"][:10]
    assert report["autov3"] == hashlib.sha256(body).hexdigest()[:12]
    assert report["note"] is None


def test_hash_notes_a_claim_that_is_wrong_and_autov3_survives_metadata(tmp_path: Path) -> None:
    tensors = lora_pair(TO_Q, 320, 320)
    plain = inweave_json("hash", write(tmp_path / "a.safetensors", tensors))
    true_claim = hashlib.sha256(_body(tmp_path / "a.safetensors")).hexdigest()
    good = inweave_json("hash", write(tmp_path / "b.safetensors", tensors, {"sshs_model_hash": true_claim}))
    assert good["note"] is None
    assert good["autov3"] == plain["autov3"]
    assert good["sha256"] != plain["sha256"]
    bad = inweave_json("hash", write(tmp_path / "c.safetensors", tensors, {"sshs_model_hash": "0" * 64}), code=1)
    assert "sshs_model_hash" in bad["note"]


def _body(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[8 + int.from_bytes(raw[:8], "little") :]


def test_the_demo_runs() -> None:
    result = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "examples" / "demo.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "same matrices after the round trip: True" in result.stdout
