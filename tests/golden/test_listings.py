"""Every listing of a real or trainer-made file places completely on its base, in both namings."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.adapter import Adapter
from inweave.exchange.check import check
from inweave.exchange.load import open_base
from inweave.formats.read import read
from inweave.targets.bases import find, known_index
from inweave.targets.detect import detect
from inweave.targets.links import Naming
from inweave.targets.resolve import resolve
from tests.support import DATA, base_listing, hollow, lora_listing, lora_listings, write_sparse

#: listings with shapes that no published model has; they place on a base made of their own module names
OTHER_BASES = [n for n in lora_listings() if n.startswith("invokeai_anima")]
NOT_AN_ADAPTER = "real_samlora_rank2"
PLACED = [n for n in lora_listings() if n not in OTHER_BASES and n != NOT_AN_ADAPTER]


def adapter_of(name: str) -> Adapter:
    listing = lora_listing(name)
    tensors = {key: hollow(shape, dtype) for key, (dtype, shape) in listing["tensors"].items()}
    return read(tensors, listing.get("metadata"), listing.get("adapter_config"))


@pytest.mark.parametrize("naming", ["diffusers", "original"])
@pytest.mark.parametrize("name", PLACED)
def test_places_completely(name: str, naming: Naming) -> None:
    adapter = adapter_of(name)
    plan = resolve(adapter, known_index(lora_listing(name)["base"], naming))  # strict: raises on anything left over
    report = plan.report
    assert report.placed + report.carried == report.tensors == len(lora_listing(name)["tensors"])
    used = {key for placement in plan.placements for key in placement.keys}
    assert used | set(adapter.carried) == set(lora_listing(name)["tensors"])


@pytest.mark.parametrize("name", PLACED)
def test_the_base_is_recognized(name: str) -> None:
    detection = detect(adapter_of(name))
    base = find(lora_listing(name)["base"]).name
    assert detection.base == base or detection.fits_as_well(base)
    if len(adapter_of(name)) > 20:
        assert detection.base == base


@pytest.mark.parametrize("name", OTHER_BASES)
def test_places_on_a_model_known_only_by_its_own_names(name: str, tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, (_, shape) in lora_listing(name)["tensors"].items():
        module = key.rsplit(".lora", 1)[0]
        if not key.endswith(("up.weight", "lora_B.weight")):
            continue
        down = key.replace("lora_up", "lora_down").replace("lora_B", "lora_A")
        dotted = module.removeprefix("diffusion_model.")
        if "." not in dotted:  # flat: give the model the module path the trainer flattened
            encoder = dotted.startswith("lora_te_")
            dotted = dotted.removeprefix("lora_te_").removeprefix("lora_unet_")
            for old, new in ANIMA_DOTS:
                dotted = dotted.replace(old, new)
            dotted = ("text_encoders.qwen." if encoder else "") + dotted
        shapes[f"{dotted}.weight"] = ("BF16", (shape[0], lora_listing(name)["tensors"][down][1][1]))
    base = write_sparse(
        tmp_path / "model.safetensors", {k: v for k, v in shapes.items() if not k.startswith("text_encoders.")}
    )
    encoder = write_sparse(
        tmp_path / "encoder.safetensors",
        {k.removeprefix("text_encoders.qwen."): v for k, v in shapes.items() if k.startswith("text_encoders.")},
    )
    adapter = adapter_of(name)
    count = resolve(adapter, open_base(base), strict=False).report.placed
    count += resolve(adapter, open_base(encoder), strict=False).report.placed if "with_te" in name else 0
    assert count == len(adapter.tensors)


ANIMA_DOTS = (
    ("blocks_0_", "blocks.0."), ("layers_0_", "layers.0."), ("self_attn_", "self_attn."),
    ("cross_attn_k", "cross_attn.k"), ("cross_attn_q", "cross_attn.q"), ("cross_attn_v", "cross_attn.v"),
    ("cross_attn_output", "cross_attn.output"), ("mlp_", "mlp."), ("cross_attn_1", "cross_attn.1"),
)  # fmt: skip


def test_an_index_list_of_another_kind_is_named_as_such() -> None:
    verdict = check(adapter_of(NOT_AN_ADAPTER), "sd1.5")
    assert not verdict.ok
    assert "not a diffusion adapter" in verdict.error


ORIGINALS = {
    "sd15_singlefile_ldm": "sd1.5",
    "sd21_singlefile_ldm": "sd2.1",
    "sdxl_singlefile_sgm": "sdxl",
    "sd35_large_singlefile": "sd3.5-large",
    "sd35_medium_singlefile": "sd3.5-medium",
    "sd3_medium_singlefile": "sd3-medium",
    "flux1_dev_bfl": "flux1-dev",
    "flux1_schnell_bfl": "flux1-schnell",
    "flux1_fill_dev_bfl": "flux1-fill-dev",
}


@pytest.mark.parametrize(("file", "base"), ORIGINALS.items())
def test_tables_derive_the_published_original_names_and_shapes(file: str, base: str) -> None:
    published = base_listing(file)
    if "bfl" in file:
        published = {f"model.diffusion_model.{name}": shape for name, shape in published.items()}
    derived: dict[str, tuple[int, ...]] = {}
    for component in known_index(base, "original"):
        if any(name.startswith(component.prefix) for name in published):
            derived |= component.tensors
    prefixes = tuple(component.prefix for component in known_index(base, "original"))
    inside = {name: shape for name, shape in published.items() if name.startswith(prefixes)}
    inside.pop("conditioner.embedders.1.model.logit_scale", None)
    assert derived == inside


@pytest.mark.parametrize(("file", "base"), ORIGINALS.items())
def test_a_single_file_checkpoint_is_recognized(file: str, base: str, tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "model.safetensors", {n: ("F16", s) for n, s in base_listing(file).items()})
    index = open_base(path)
    assert index.base == base
    assert index.naming == "original"
    known = known_index(base, "original").components["unet"]
    assert index.components["unet"].parts == known.parts
    homes = {p: (h.start, h.length, h.swap, h.transpose) for p, h in index.components["unet"].homes.items()}
    assert homes == {p: (h.start, h.length, h.swap, h.transpose) for p, h in known.homes.items()}


@pytest.mark.parametrize("name", ["gen_kohya_sdxl_lora", "gen_kohya_sd21_lora", "invokeai_flux_lora_kohya_format"])
def test_a_whole_sparse_file_checks_clean_against_a_sparse_checkpoint(name: str, tmp_path: Path) -> None:
    listing = lora_listing(name)
    file = write_sparse(tmp_path / "lora.safetensors", listing["tensors"])
    checkpoint = next(f for f, base in ORIGINALS.items() if base == find(listing["base"]).name)
    base = write_sparse(tmp_path / "base.safetensors", {n: ("F16", s) for n, s in base_listing(checkpoint).items()})
    verdict = check(file, base, values="none")
    assert verdict.ok, verdict.as_dict()
    assert verdict.base == find(listing["base"]).name


def test_a_diffusers_folder_is_a_base(tmp_path: Path) -> None:
    index = known_index("sdxl")
    folders = {"unet": "unet", "te1": "text_encoder", "te2": "text_encoder_2"}
    for component in index:
        folder = tmp_path / folders[component.name]
        folder.mkdir()
        write_sparse(folder / "model.fp16.safetensors", {n: ("F16", s) for n, s in component.tensors.items()})
    (tmp_path / "model_index.json").write_text("{}")
    verdict = check(adapter_of("gen_kohya_sdxl_lora"), tmp_path, values="none")
    assert verdict.ok
    assert verdict.base == "sdxl"
    assert set(verdict.report.components) == {"unet", "te1", "te2"}


@pytest.mark.parametrize("file", sorted((DATA / "files").glob("*.safetensors")), ids=lambda p: p.stem)
def test_the_real_files_check_clean(file: Path) -> None:
    verdict = check(file, "sd1.5")
    assert verdict.ok, verdict.as_dict()
    assert verdict.detected == "sd1.5"
    assert verdict.namings == {"diffusers": True, "original": True}
