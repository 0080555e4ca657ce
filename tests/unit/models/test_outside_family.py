"""A model family of another package, installed with an entry point: its models load, generate and train.

The package is `tests/data/outside_family`: a family, its network, its configurations, and the dist-info folder that pip
would write. Every test runs it in a process of its own, because families are loaded once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("diffusers")

from inweave.errors import ConfigError
from inweave.models import families as package
from inweave.models.families.base import Network, Variant
from inweave.models.families.flux import Flux1
from tests.forked import run_forked

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "data" / "outside_family"
PROGRAM = """
import importlib, torch, transformers
from pathlib import Path
from safetensors.torch import save_file
from inweave.models import bundled

torch.manual_seed(0)
folder, single = bundled.write_skeleton("mosaic-tiny", Path("mosaic-tiny")), {}
prefixes = {"transformer": "model.diffusion_model.", "vae": "first_stage_model.",
            "text_encoder": "cond_stage_model.transformer."}
for part, prefix in prefixes.items():
    class_name, config = bundled.component_config("mosaic-tiny", part)
    module = {"transformer": "mosaic.networks", "vae": "diffusers", "text_encoder": "transformers"}[part]
    kind = getattr(importlib.import_module(module), class_name)
    network = kind(kind.config_class(**config)) if part == "text_encoder" else kind.from_config(config)
    tensors = {name: torch.randn_like(value) / value[0].numel() ** 0.5 if value.dim() > 1 else value.clone()
               for name, value in network.state_dict().items() if value.is_floating_point()}
    save_file(tensors, folder / part / "model.safetensors")
    single |= {prefix + name: value for name, value in tensors.items()}
save_file(single, "mosaic.safetensors")
save_file({name: value + 0.01 * torch.randn_like(value) for name, value in single.items()}, "mosaic-2.safetensors")

import inweave

settings = {"dataset": "inweave/pixel", "model": "mosaic-tiny", "steps": 2, "learning_rate": 0.1, "output": "out"}
inweave.train(inweave.TrainConfig(**settings))
for network in ("lokr", "loha"):  # which diffusers' names cannot hold for a model that nobody knows
    inweave.train(inweave.TrainConfig(**settings | {"network": network, "output": network}))
for image, model, loras in (("folder", "mosaic-tiny", ()), ("single", "mosaic.safetensors", ()),
                            ("lora", "mosaic-tiny", ["out/lora.safetensors"])):
    pipe = inweave.pipeline(model, loras=loras, device="cpu")
    pipe("a red apple", seed=1).save(f"{image}.png")
"""


def run(arguments: list[str], folder: Path, *packages: Path, fails: bool = False) -> str:
    """Run Python with the packages on its path; return what it printed."""
    if arguments[0] == "-c":
        program, rest = arguments[1], arguments[2:]
    else:
        assert arguments[:2] == ["-m", "inweave"]
        program, rest = "from inweave.cli.app import main; main()", arguments[2:]
    done = run_forked(program, *rest, folder=folder, packages=packages)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the same random model twice, a LoRA trained on it, and images of all three."""
    folder = tmp_path_factory.mktemp("mosaic")
    run(["-c", PROGRAM], folder, PACKAGE)
    return folder


def test_a_family_of_another_package_generates_and_trains(models: Path) -> None:
    from_folder, from_file, with_lora = (Image.open(models / f"{name}.png") for name in ("folder", "single", "lora"))
    assert from_folder.size == (64, 64) and len(set(from_folder.tobytes())) > 50
    assert from_folder.tobytes() == from_file.tobytes() != with_lora.tobytes()


def test_its_adapters_are_detected_and_checked_without_the_model(models: Path) -> None:
    inspected = run(["-m", "inweave", "inspect", "out/lora.safetensors"], models, PACKAGE)
    assert "mosaic-tiny" in inspected
    for base in ("mosaic-tiny", "mosaic-tiny/transformer", "mosaic.safetensors"):
        assert "fits" in run(["-m", "inweave", "check", "out/lora.safetensors", "--base", base], models, PACKAGE)
    arguments = ["-m", "inweave", "convert", "out/lora.safetensors", "again.safetensors", "--to", "diffusers"]
    run(arguments, models, PACKAGE)
    without = run(["-m", "inweave", *arguments[2:], "--force"], models, fails=True)
    assert "which base model is this adapter for?" in " ".join(without.split())


def test_its_adapters_are_written_in_names_that_are_known(models: Path) -> None:
    """It has no name table, so nothing is written as kohya or comfy: not by default, and not on request."""
    data = ["--dataset", "inweave/pixel", "--model", "mosaic-tiny", "--steps", "2"]
    checked = run(["-m", "inweave", "train", *data, "--output", "x", "--check", "--json"], models, PACKAGE)
    reason = "kohya spells modules as the original model does, and inweave has no table of the original names of mosaic"
    assert f'dialect "diffusers" is used: {reason}' in checked.replace('\\"', '"')
    arguments = ["-m", "inweave", "train", *data, "--output", "x", "--check", "--set", "gradient_checkpointing=full"]
    refusal = " ".join(run(arguments, models, PACKAGE, fails=True).split())
    assert "MosaicTransformer does not support it" in refusal
    for more in (["--check"], []):
        arguments = ["-m", "inweave", "train", *data, "--output", "x", "--set", "dialect=kohya", *more]
        assert f"dialect: {reason}" in " ".join(run(arguments, models, PACKAGE, fails=True).split())
    assert not (models / "x" / "lora.safetensors").exists()
    assert "diffusers" in run(["-m", "inweave", "inspect", "out/lora.safetensors"], models, PACKAGE)
    for base in ("mosaic-tiny", "mosaic-tiny/transformer", "mosaic.safetensors"):
        for dialect in ("kohya", "comfy"):
            arguments = ["convert", "out/lora.safetensors", "k.safetensors", "--to", dialect, "--base", base]
            assert "no table of the original names" in run(["-m", "inweave", *arguments], models, PACKAGE, fails=True)
    for arguments in (
        ["resize", "out/lora.safetensors", "--rank", "1", "-o", "small.safetensors"],
        ["extract", "mosaic-2.safetensors", "mosaic.safetensors", "--rank", "1", "-o", "difference.safetensors"],
    ):
        assert "diffusers" in run(["-m", "inweave", *arguments, "--json"], models, PACKAGE)
        refused = run(["-m", "inweave", *arguments, "--force", "--to", "kohya"], models, PACKAGE, fails=True)
        assert "no table of the original names" in " ".join(refused.split())


def test_without_the_package_its_model_is_refused_by_name(models: Path) -> None:
    output = run(["-m", "inweave", "generate", "a cat", "--model", "mosaic-tiny"], models, fails=True)
    assert "a network of class 'MosaicTransformer'; known are UNet2DConditionModel" in output


def test_a_broken_family_is_reported_by_name(tmp_path: Path) -> None:
    info = tmp_path / "cracked-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cracked\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[inweave.families]\ncracked = cracked:FAMILY\n", "utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    command = [sys.executable, "-m", "inweave", "generate", "a cat", "-o", "cat.png"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode and "Traceback" not in done.stderr, done.stderr
    assert "plugin 'cracked' (inweave.families) of cracked cannot be loaded" in " ".join(done.stderr.split())
    assert not (tmp_path / "cat.png").exists()


class Relative(Flux1):
    """A family that shares no name with a built-in one."""

    name = "relative"
    variants: Any = ()  # type: ignore[misc]
    presets = {"relative": {}}  # noqa: RUF012


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The plugins that this process sees, by name."""
    plugins: dict[str, object] = {}
    monkeypatch.setattr(package, "load_plugins", lambda group: plugins)
    package.families.cache_clear()
    yield plugins
    package.families.cache_clear()


def test_families_of_other_packages_are_asked_first(installed: dict[str, object]) -> None:
    installed["relative"] = relative = Relative()
    assert package.families() == (relative, *package.BUILT_IN)
    assert package.family_of("FluxTransformer2DModel", {}) is relative


def relative_with(**fields: Any) -> object:
    return type("Changed", (Relative,), fields)()


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (Relative, "expected an instance of Family, got ABCMeta"),
        (relative_with(name="sd"), "the family name 'sd' is taken by inweave"),
        (relative_with(presets={"flux": {}}), "the preset name 'flux' is taken by inweave"),
        (
            relative_with(variants=(Variant("sdxl", "relative", "a/b", 1, 1, 1.0),)),
            "the model name 'sdxl' is taken by inweave",
        ),
        (
            relative_with(networks=(Network("vae", "AutoencoderKL", "elsewhere"),)),
            "the network class 'AutoencoderKL' is taken by diffusers",
        ),
    ],
)
def test_a_clash_is_refused_by_name(installed: dict[str, object], plugin: object, problem: str) -> None:
    installed["new"] = plugin
    with pytest.raises(ConfigError) as caught:
        package.families()
    assert [str(each) for each in caught.value.problems] == [f"plugin 'new' (inweave.families): {problem}"]


def test_what_a_family_lacks_and_clashes_of_two_packages_are_reported_together(installed: dict[str, object]) -> None:
    lacking = ("steps", "guidance", "attention")
    fields = {name: value for name, value in vars(Flux1).items() if name not in lacking and not name.startswith("__")}
    installed |= {
        "a": Relative(),
        "b": relative_with(presets={"other": {}}),
        "c": type("Unfinished", Flux1.__bases__, fields | {"name": "unfinished"})(),
    }
    with pytest.raises(ConfigError) as caught:
        package.families()
    assert [str(each) for each in caught.value.problems] == [
        "plugin 'b' (inweave.families): the family name 'relative' is taken by plugin 'a'",
        "plugin 'c' (inweave.families): the family does not set steps, guidance, attention",
    ]
