"""Configurations in files: TOML there and back, what cannot be read, and options over it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inweave.errors import ConfigError, FormatError
from inweave.training.config.schema import TrainConfig
from inweave.training.config.starter import starter_toml
from inweave.training.config.types import NETWORKS, OUTPUT_DIALECTS
from tests.support import sized


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nmodel = "m"\ndataset = "d"\n[network]\nnetwork_dim = 8\nresolution = "none"\n'
        '[parts]\nvae = "v"\n[[rules]]\npattern = "ff"\nskip = true\n'
    )
    c = TrainConfig.load(path)
    assert (c.model, c.rank, c.resolution, c.parts, c.rules[0].skip) == ("m", 8, None, {"vae": "v"}, True)
    path.write_text('dataset = "d"\n\nnetwork_dim = 0\nstepz = 3\nvram = "x"\n')
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    text = str(caught.value)
    for word in (f"{path}:3: network_dim (rank)", f"{path}:4: stepz", f"{path}:5: vram"):
        assert word in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('dataset = "d"\nrank = \n', "line 2"),
        ("rank = " + "[" * 20_000, "nested too deeply"),
        ("rank = " + "9" * 10_000, "not valid TOML"),
        ("a" + ".a" * 5_000 + " = 1", "dots"),
        ("[a]\nrank = 1\n[b]\nrank = 2\n", "rank: is set twice"),
        ("".join(f"a{i} = 1\n" for i in range(2_000)), "no such setting"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises((ConfigError, FormatError), match=message) as caught:
        TrainConfig.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 50_000
    with pytest.raises(ConfigError, match="no such file"):
        TrainConfig.load(tmp_path / "none.toml")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SMALL = st.floats(1e-12, 1e6, allow_nan=False)
#: a strategy for every kind of field, so that a new field is covered or noticed
WORDS: dict[str, st.SearchStrategy[Any]] = {
    "targets": st.one_of(st.sampled_from(["attention", "all", r".*\.to_q"]), st.lists(st.just("to_k"), min_size=1)),
    "rules": st.lists(st.builds(lambda rank: {"pattern": 'a"\\.b', "rank": rank}, st.integers(1, 64)), max_size=3),
    "name": st.text("abc \"'=#é", min_size=1, max_size=12), "parts": st.dictionaries(TEXT, TEXT, max_size=3),
    "optimizer_args": st.dictionaries(
        TEXT.map(lambda text: f"x{text}"), st.one_of(st.booleans(), st.integers(-9, 9), SMALL, TEXT), max_size=3
    ),
    "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    "caption_extensions": st.lists(TEXT, min_size=1, max_size=3),
    "sample_prompts": st.lists(TEXT, max_size=3),
    "vram": st.sampled_from(["auto", "12GiB"]),
    "ram": st.sampled_from(["24GiB", "auto"]),
    "offload": st.sampled_from(["off", "auto"]),  # "blocks" excludes others
    "offload_activations": st.sampled_from(["off", "auto"]),  # "on" needs gradient checkpointing
    "network": st.sampled_from(NETWORKS), "dialect": st.sampled_from(OUTPUT_DIALECTS),
    "warmup": st.one_of(st.integers(1, 1000), st.floats(0, 0.9)),
    "resolution": st.one_of(st.none(), st.integers(16, 8192)),
    "clip_skip": st.one_of(st.none(), st.integers(1, 12)),
    "max_length": st.integers(2, 4096),
    "min_bucket": st.integers(8, 64),
    "reference_resolution": st.integers(8, 2048),
    "max_bucket": st.one_of(st.none(), st.integers(256, 4096)),
    "bucket_step": st.integers(8, 128),
}  # fmt: skip
#: fields that exclude others, left to the tests above
APART = {
    "epochs", "lr_scheduler_args", "lr_min_ratio",
    "lokr_factor", "conv_rank", "conv_alpha", "cosine_cycles", "patience", "train_denoiser",
    "train_text_encoders",
    "objective", "timestep_shift", "dataset", "shard", "text_encoder_stop",
    "hidden_dropout", "rank_dropout", "module_dropout", "output_dropout", "tucker", "lokr_decompose_both", "qat",
}  # fmt: skip


def values(name: str) -> st.SearchStrategy[Any]:
    if name in WORDS:
        return WORDS[name]
    kind = TrainConfig.model_fields[name].annotation
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    message = str(kind)
    empty = st.none() if "None" in message else st.nothing()
    if kind is bool:
        return st.booleans()
    if "int" in message:
        return st.one_of(empty, st.integers(1, 2**31 - 1))
    if "float" in message:
        return st.one_of(empty, st.floats(1e-12, 0.999))
    return st.one_of(empty, TEXT)


@settings(max_examples=sized(20, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({}, optional={n: values(n) for n in sorted(TrainConfig.model_fields.keys() - APART)}),
    st.booleans(),
)
def test_toml_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], everything: bool
) -> None:
    c = TrainConfig.model_validate({"dataset": "a 'b' \"c\"\n\t\x7f", **fields})
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(c.to_toml(everything=everything), "utf-8", newline="\n")
    back = TrainConfig.load(path)
    assert back == c
    unsaid = {name for name in c.model_fields_set if getattr(c, name) is None}  # text fields cannot say so
    assert everything or c.model_fields_set - unsaid <= back.model_fields_set <= c.model_fields_set


def test_arguments_of_a_scheduler_there_and_back(tmp_path: Path) -> None:
    own = {"milestones": [3, 9], "gamma": 0.5}
    c = TrainConfig.of(model="m", dataset="d", steps=9, lr_scheduler="MultiStepLR", lr_scheduler_args=own)
    path = tmp_path / "run.toml"
    path.write_text(c.to_toml(), "utf-8")
    assert TrainConfig.load(path) == c and c.lr_scheduler == "torch.optim.lr_scheduler.MultiStepLR"


def test_reading_a_configuration_needs_no_torch() -> None:
    program = (
        "import sys, inweave.training.config.schema, inweave.training.importers.detect; sys.exit('torch' in "
        "sys.modules or 'yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "style.toml"
    file.write_text("rank = 4\nepochs = 1\nlearning_rate = 1e-3\n")
    result = TrainConfig.load(file, dataset="d", network_dim=8, max_train_steps=5)
    assert (result.dataset, result.rank, result.steps, result.epochs, result.learning_rate) == ("d", 8, 5, None, 1e-3)
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(file, dataset="d", rnk=3, rank="many")
    text = str(caught.value)
    assert "did you mean 'rank'?" in text and "rank: " in text and len(caught.value.problems) == 2
    file.write_text("rank = 4\nrnk = 1\n")
    with pytest.raises(ConfigError, match=r"style\.toml:2: rnk: there is no such setting"):
        TrainConfig.load(file, dataset="d")


def test_a_starter_configuration_is_valid_and_names_every_setting(tmp_path: Path) -> None:
    chosen = {"dataset": 'pho"tos/', "model": "sdxl.safetensors", "rank": 8, "steps": 100, "vram": "12GiB"}
    file = tmp_path / "style.toml"
    file.write_text(starter_toml(TrainConfig.of(**chosen)), "utf-8")
    read = TrainConfig.load(file)
    assert read == TrainConfig.of(**chosen) and read.model_fields_set == set(chosen)
    commented = [line for line in file.read_text("utf-8").splitlines() if re.match(r"# \w+ =", line)]
    assert {re.match(r"# (\w+)", line)[1] for line in commented} == {*TrainConfig.model_fields} - {*chosen}
    for line in commented:  # a default is valid where it is written
        if not re.match(r"# \w+ = +#", line):
            value = tomllib.loads(line.removeprefix("# "))
            assert getattr(TrainConfig.of(**chosen, **value), next(iter(value))) is not None
