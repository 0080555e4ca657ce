"""The base of a checkpoint and of an adapter: recognized, suggested in the message, or reported as unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.exchange.load import open_base
from inweave.formats.read import read
from inweave.targets.bases import find
from inweave.targets.detect import detect
from inweave.targets.resolve import resolve
from tests.support import DATA, base_listing, dotted_pair, hollow, lora_listing, write_sparse


def test_a_quantized_checkpoint_keeps_its_family(tmp_path: Path) -> None:
    """Scales of fp8 weights are not weights: the model is still FLUX.1."""
    shapes = {name: ("F8_E4M3", shape) for name, shape in base_listing("flux1_dev_bfl").items()}
    for name in list(shapes):
        if name.endswith(".weight"):
            shapes[name.removesuffix("weight") + "scale_weight"] = ("F32", ())
            shapes[name.removesuffix("weight") + "scale_input"] = ("F32", ())
    shapes["scaled_fp8"] = ("F8_E4M3", (2,))
    index = open_base(write_sparse(tmp_path / "flux.safetensors", shapes))
    assert index.base == "flux1-dev"
    listing = lora_listing("invokeai_flux_lora_diffusers_format")
    adapter = read({key: hollow(shape, dtype) for key, (dtype, shape) in listing["tensors"].items()})
    assert resolve(adapter, index).report.placed == 988


def test_both_bases_are_named_for_a_checkpoint_with_extra_tensors(tmp_path: Path) -> None:
    shapes = {name: ("F16", shape) for name, shape in base_listing("sdxl_singlefile_sgm").items()}
    shapes["model.diffusion_model.v_pred"] = ("F16", ())
    shapes["model.diffusion_model.ztsnr"] = ("F16", ())
    base = write_sparse(tmp_path / "vpred.safetensors", shapes)
    assert open_base(base).base == "sdxl"
    verdict = inweave.check(DATA / "files" / "catundchat_sd15_pytorch_lora_weights.safetensors", base, values="none")
    assert "sd1.5" in str(verdict.error)
    assert "sdxl" in str(verdict.error)


@pytest.mark.parametrize(
    "name", ["FLUX.1-dev", "black-forest-labs/FLUX.1-dev", "SD_1.5", "sdxl-base-1.0", "Wan2.2", "sd15-inpainting"]
)
def test_the_usual_names_are_known(name: str) -> None:
    assert find(name) is not None


def test_inpaint_and_fill_adapters_do_not_fit_the_plain_base() -> None:
    """Only a control adapter, which doubles the inputs, may widen the first layer unasked."""
    conv = {
        "lora_unet_conv_in.lora_down.weight": hollow((4, 9, 3, 3)),
        "lora_unet_conv_in.lora_up.weight": hollow((320, 4, 1, 1)),
    }
    adapter = read(conv | dotted_pair("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", 320, 320))
    verdict = inweave.check(adapter, "sd1.5", values="none")
    assert not verdict.ok
    assert "sd1.5-inpaint" in str(verdict.error)
    assert detect(adapter).base == "sd1.5-inpaint"
    fill = read(dotted_pair("img_in", 3072, 384) | dotted_pair("double_blocks.0.img_attn.proj", 3072, 3072))
    assert detect(fill).base == "flux1-fill-dev"
    control = read(dotted_pair("img_in", 3072, 128) | dotted_pair("double_blocks.0.img_attn.proj", 3072, 3072))
    assert inweave.check(control, "flux1-dev", values="none").ok


def test_an_unknown_model_is_reported_as_unknown() -> None:
    names = [
        f"double_blocks.{i}.{leaf}"
        for i in range(20)
        for leaf in ("img_attn.proj", "img_attn_qkv", "txt_attn_qkv", "fc1", "fc2")
    ]
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= {f"{name}.lora_A.weight": hollow((4, 3072)), f"{name}.lora_B.weight": hollow((3072, 4))}
    verdict = inweave.check(read(tensors), "flux1-dev", values="none")
    assert verdict.detected is None
    assert "does not know" in str(verdict.error)
