"""Cases that once went wrong: each names what a user would have got."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.exchange.convert import rewrite
from inweave.exchange.load import open_base
from inweave.formats.read import read
from inweave.targets.bases import find, known_index
from inweave.targets.detect import detect
from inweave.targets.resolve import resolve
from tests.support import DATA, base_listing, hollow, lora_listing, lora_pair, random, tensor, write, write_sparse

M = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def dotted_pair(module: str, out: int, into: int, seed: int = 0) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": random(seed, 4, into), f"{module}.lora_B.weight": random(seed + 1, out, 4)}


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


def test_inpaint_and_fill_adapters_do_not_fit_the_plain_base() -> None:
    """Only a control adapter, which doubles the inputs, may widen the first layer unasked."""
    conv = {
        "lora_unet_conv_in.lora_down.weight": hollow((4, 9, 3, 3)),
        "lora_unet_conv_in.lora_up.weight": hollow((320, 4, 1, 1)),
    }
    adapter = read(conv | dotted_pair(f"unet.{M}", 320, 320))
    verdict = inweave.check(adapter, "sd1.5", values="none")
    assert not verdict.ok
    assert "sd1.5-inpaint" in str(verdict.error)
    assert detect(adapter).base == "sd1.5-inpaint"
    fill = read(dotted_pair("img_in", 3072, 384) | dotted_pair("double_blocks.0.img_attn.proj", 3072, 3072))
    assert detect(fill).base == "flux1-fill-dev"
    control = read(dotted_pair("img_in", 3072, 128) | dotted_pair("double_blocks.0.img_attn.proj", 3072, 3072))
    assert inweave.check(control, "flux1-dev", values="none").ok


def test_duplicates_do_not_depend_on_the_order_of_keys_and_never_mix() -> None:
    one = {f"unet.{M}.lora_A.weight": random(1, 4, 320), f"unet.{M}.lora_B.weight": random(2, 320, 4)}
    two = {f"unet.{M}.lora.down.weight": random(3, 4, 320), f"unet.{M}.lora.up.weight": random(4, 320, 4)}
    flat = lora_pair(f"lora_unet_{M.replace('.', '_')}", 320, 320, seed=9)
    for other in (two, flat):
        used = set()
        for order in itertools.permutations(one | other):
            plan = resolve(read({key: (one | other)[key] for key in order}), known_index("sd1.5"), strict=False)
            used.add(frozenset(key for placement in plan.placements for key in placement.keys))
        assert len(used) == 1
        assert next(iter(used)) in (frozenset(one), frozenset(other))


def test_both_bases_are_named_for_a_checkpoint_with_extra_tensors(tmp_path: Path) -> None:
    shapes = {name: ("F16", shape) for name, shape in base_listing("sdxl_singlefile_sgm").items()}
    shapes["model.diffusion_model.v_pred"] = ("F16", ())
    shapes["model.diffusion_model.ztsnr"] = ("F16", ())
    base = write_sparse(tmp_path / "vpred.safetensors", shapes)
    assert open_base(base).base == "sdxl"
    verdict = inweave.check(DATA / "files" / "catundchat_sd15_pytorch_lora_weights.safetensors", base, values="none")
    assert "sd1.5" in str(verdict.error)
    assert "sdxl" in str(verdict.error)


def test_an_unknown_model_is_reported_as_unknown() -> None:
    names = [
        f"double_blocks.{i}.{leaf}"
        for i in range(20)
        for leaf in ("img_attn.proj", "img_attn_qkv", "txt_attn_qkv", "fc1", "fc2")
    ]
    tensors = {}
    for name in names:
        tensors |= {f"{name}.lora_A.weight": hollow((4, 3072)), f"{name}.lora_B.weight": hollow((3072, 4))}
    verdict = inweave.check(read(tensors), "flux1-dev", values="none")
    assert verdict.detected is None
    assert "does not know" in str(verdict.error)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_alpha_that_is_no_number_is_named(value: float) -> None:
    adapter = read(lora_pair("lora_unet_conv_out", 4, 320) | {"lora_unet_conv_out.alpha": tensor(value)})
    assert [problem.fault for problem in adapter.problems] == ["malformed"]
    assert "alpha" in adapter.problems[0].reason


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_rows_that_change_places_do_so_in_every_product(kind: str) -> None:
    """Flux stores (shift, scale) where diffusers stores (scale, shift); the way there and back is the identity."""
    torch = pytest.importorskip("torch")
    from inweave.ops.delta import change

    module = "lora_transformer_norm_out_linear"
    factors = (
        {"hada_w1_a": (6144, 2), "hada_w1_b": (2, 3072), "hada_w2_a": (6144, 2), "hada_w2_b": (2, 3072)}
        if kind == "loha"
        else {"lokr_w1": (4, 4), "lokr_w2": (1536, 768)}
    )
    tensors = {f"{module}.{suffix}": random(n, *shape) for n, (suffix, shape) in enumerate(factors.items())}
    index = known_index("flux1-dev")
    there = rewrite(read(tensors), "kohya", index)
    assert not there.lost
    one, two = (change(next(iter(read(t))).factors, None) for t in (tensors, there.tensors))
    assert torch.equal(one, torch.cat(two.chunk(2)[::-1]))
    back = rewrite(read(there.tensors, there.metadata), "onetrainer", index)
    assert all(tensors[key].same(back.tensors[key]) for key in tensors)


def test_only_factors_count_as_zeros() -> None:
    module = "lora_unet_up_blocks_1_attentions_0_proj_in"
    tensors = lora_pair(module, 1280, 1280) | {f"{module}.alpha": tensor(0.0)}
    assert inweave.check(read(tensors), "sd1.5").zeros == []
    loha = {
        f"{module}.hada_{role}": random(1, *shape)
        for role, shape in (("w1_a", (1280, 2)), ("w1_b", (2, 1280)), ("w2_b", (2, 1280)))
    }
    loha[f"{module}.hada_w2_a"] = tensor(np.zeros((1280, 2)))
    assert inweave.check(read(loha), "sd1.5").zeros == [f"{module}.hada_w2_a"]


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_adapter_of_a_changed_base_is_refused(start: str) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 4, "init_lora_weights": start}
    with pytest.raises(FormatError, match="changed base"):
        read(dotted_pair("base_model.model.proj", 8, 8), {}, config)


@pytest.mark.parametrize(
    "name", ["FLUX.1-dev", "black-forest-labs/FLUX.1-dev", "SD_1.5", "sdxl-base-1.0", "Wan2.2", "sd15-inpainting"]
)
def test_the_usual_names_are_known(name: str) -> None:
    assert find(name) is not None


class TestPeftBesideItsLayers:
    """PEFT's own directories, where it saves more than factors."""

    @pytest.fixture
    def libraries(self):  # type: ignore[no-untyped-def]
        pytest.importorskip("torch")
        return pytest.importorskip("peft"), pytest.importorskip("transformers")

    def llama(self, transformers):  # type: ignore[no-untyped-def]
        import torch

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def saved(self, libraries, folder: Path, **options):  # type: ignore[no-untyped-def]
        import torch
        from safetensors.torch import save_file

        peft, transformers = libraries
        base = self.llama(transformers)
        save_file({k: v.clone() for k, v in base.state_dict().items()}, folder / "base.safetensors")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=3, **options))
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.data = torch.randn_like(parameter) * 0.3
        model.save_pretrained(str(folder / "one"))
        return model

    def test_biases_survive_peft_to_peft(self, libraries, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        import torch

        peft, transformers = libraries
        torch.manual_seed(1)
        base = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        )
        from safetensors.torch import save_file

        save_file(
            {k: v.clone() for k, v in base.state_dict().items() if k != "lm_head.weight"}, tmp_path / "base.safetensors"
        )
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["c_attn"], bias="all", fan_in_fan_out=True)
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.data = torch.randn_like(parameter)
        model.save_pretrained(str(tmp_path / "one"))
        inweave.convert(tmp_path / "one", tmp_path / "two", to="peft", base=tmp_path / "base.safetensors")
        one, two = inweave.load(tmp_path / "one").tensors, inweave.load(tmp_path / "two").tensors
        assert one.keys() == two.keys()
        assert all(one[key].same(two[key]) for key in one)
        assert any(key.endswith("base_layer.bias") for key in one)

    def test_adapted_embeddings_with_their_saved_weights(self, libraries, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        self.saved(libraries, tmp_path, target_modules=["q_proj", "embed_tokens", "lm_head"])
        verdict = inweave.check(tmp_path / "one", tmp_path / "base.safetensors")
        assert verdict.ok, verdict.as_dict()
        assert any("base_layer.weight" in warning for warning in verdict.report.warnings)
        inweave.convert(tmp_path / "one", tmp_path / "two", to="peft", base=tmp_path / "base.safetensors")
        one, two = inweave.load(tmp_path / "one").tensors, inweave.load(tmp_path / "two").tensors
        assert one.keys() == two.keys()
        assert all(one[key].same(two[key]) for key in one)

    def test_a_flag_that_contradicts_a_layer_is_settled_by_its_shape(self, tmp_path: Path) -> None:
        config = {"peft_type": "LORA", "lora_alpha": 4, "r": 4, "fan_in_fan_out": False}
        tensors = dotted_pair("base_model.model.attn.c_attn", 24, 8)
        base = write(
            tmp_path / "base.safetensors", {"attn.c_attn.weight": random(1, 8, 24), "head.weight": random(2, 5, 8)}
        )
        verdict = inweave.check(read(tensors, {}, config), base)
        assert verdict.ok
        assert any("fan_in_fan_out" in warning for warning in verdict.report.warnings)


def test_two_names_in_one_file_can_be_inspected(tmp_path: Path) -> None:
    from tests.e2e.test_commands import inweave as run

    tensors = {
        key.replace(".weight", f".{name}.weight"): t
        for name in ("a", "b")
        for key, t in dotted_pair("transformer.x_embedder", 3072, 64).items()
    }
    path = write(tmp_path / "two.safetensors", tensors)
    refused = run("inspect", path)
    assert refused.returncode == 2
    assert "--adapter" in refused.stderr
    assert json.loads(run("inspect", path, "--adapter", "b", "--json").stdout)["modules"] == 1
