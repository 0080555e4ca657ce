"""Autoencoder names lead from a single file to diffusers and back, one to one."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers

from inweave.models import bundled
from inweave.targets.index import Component, component_from_names
from inweave.targets.tables import TABLES
from inweave.weights.source import DictSource, Renamed
from tests.support import base_listing

PREFIX = "first_stage_model."
TABLE = TABLES["vae"]
Shapes = dict[str, tuple[int, ...]]


def autoencoder(variant: str) -> tuple[Shapes, dict[str, object]]:
    class_name, config = bundled.component_config(variant, "vae")
    with torch.device("meta"):
        model = getattr(diffusers, class_name).from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, config


def as_ldm(parts: Shapes) -> Shapes:
    """The same autoencoder as a single file has it, with 1x1 convolutions for attention."""
    return {
        link.original: (*link.shape, 1, 1) if ".attn_1." in link.original and len(link.shape) == 2 else link.shape
        for link in TABLE.links(parts, "diffusers")
    }


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3-medium", "flux1-dev", "flux2-dev"])
def test_a_bijection_both_ways(variant: str) -> None:
    parts, _ = autoencoder(variant)
    ldm = as_ldm(parts)
    assert len(ldm) == len(parts)
    assert {link.part: link.shape for link in TABLE.links(ldm, "original")} == parts
    homes = Component("vae", TABLE, "original", ldm, "original", PREFIX).homes
    assert homes.keys() == parts.keys()
    assert {home.tensor for home in homes.values()} == {PREFIX + name for name in ldm}
    assert not any(home.swap or home.transpose or home.length is not None for home in homes.values())


@pytest.mark.parametrize(
    ("variant", "file"),
    [("sd1.5", "sd15_singlefile_ldm"), ("sd2.1", "sd21_singlefile_ldm"), ("sdxl", "sdxl_singlefile_sgm")],
)
def test_published_files_have_these_names(variant: str, file: str) -> None:
    published = {n.removeprefix(PREFIX): s for n, s in base_listing(file).items() if n.startswith(PREFIX)}
    assert as_ldm(autoencoder(variant)[0]) == published


@pytest.mark.parametrize("variant", ["sd1.5", "flux1-dev"])
def test_diffusers_converts_the_same_way(variant: str) -> None:
    """Each tensor holds one number that identifies it."""
    parts, config = autoencoder(variant)
    ldm = as_ldm(parts)
    numbered = {
        PREFIX + name: torch.full([1] * len(shape), float(number)) for number, (name, shape) in enumerate(ldm.items())
    }
    theirs = convert_ldm_vae_checkpoint(dict(numbered), config)
    homes = Component("vae", TABLE, "original", ldm, "original", PREFIX).homes
    assert {name: numbered[home.tensor].item() for name, home in homes.items()} == {
        name: tensor.item() for name, tensor in theirs.items()
    }


def test_the_convolutions_of_flux2_are_inside_of_its_halves() -> None:
    parts, _ = autoencoder("flux2-dev")
    ldm = as_ldm(parts)
    moved = {name for name in ldm if "quant_conv" in name}
    assert moved == {
        f"{each}.{leaf}" for each in ("encoder.quant_conv", "decoder.post_quant_conv") for leaf in ("weight", "bias")
    }
    assert {"bn.running_mean", "bn.running_var"} < ldm.keys() & parts.keys()
    assert component_from_names("vae", ldm).naming == "original"


def test_a_file_is_read_as_diffusers_has_it() -> None:
    parts, _ = autoencoder("sdxl")
    ldm = as_ldm(parts)
    attention = "decoder.mid.attn_1.q.weight"
    values = torch.arange(512 * 512, dtype=torch.float32).reshape(ldm[attention])
    component = Component("vae", TABLE, "original", ldm, "original", PREFIX)
    source = Renamed(DictSource({PREFIX + attention: values}), component)
    assert torch.equal(source.get("decoder.mid_block.attentions.0.to_q.weight"), values[:, :, 0, 0])


def test_the_family_is_identified_from_names() -> None:
    parts, _ = autoencoder("sd3-medium")
    assert component_from_names("vae", parts).table is TABLE
    assert component_from_names("vae", parts).naming == "diffusers"
    assert component_from_names("vae", as_ldm(parts)).naming == "original"


def test_linear_attention_in_the_file_and_unknown_names_stay() -> None:
    ldm = {"decoder.mid.attn_1.k.weight": (512, 512), "loss.logvar": (), "decoder.up.3.block.0.conv1.bias": (4,)}
    assert {link.original: (link.part, link.shape) for link in TABLE.links(ldm, "original")} == {
        "decoder.mid.attn_1.k.weight": ("decoder.mid_block.attentions.0.to_k.weight", (512, 512)),
        "loss.logvar": ("loss.logvar", ()),
        "decoder.up.3.block.0.conv1.bias": ("decoder.up_blocks.0.resnets.0.conv1.bias", (4,)),
    }


def test_the_causal_autoencoder_of_qwen_image_has_two_namings_too() -> None:
    """Wan's original names, as ComfyUI's files have them; diffusers converts each to the same place."""
    with torch.device("meta"):
        model = diffusers.AutoencoderKLQwenImage()
    parts = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}  # type: ignore[attr-defined]
    table = component_from_names("vae", parts).table
    assert table is TABLES["causal-vae"]
    original = {link.original: link.shape for link in table.links(parts, "diffusers")}
    assert len(original) == len(parts)
    read = component_from_names("vae", original, PREFIX)
    assert (read.table, read.naming) == (table, "original")
    assert {link.part: link.shape for link in table.links(original, "original")} == parts
    numbers = {name: float(number) for number, name in enumerate(original)}
    theirs = convert_wan_vae_to_diffusers(dict(numbers))
    assert theirs == {part: numbers[home.tensor.removeprefix(PREFIX)] for part, home in read.homes.items()}
