"""Wrappers, second experts, fused projections and bare parameters: each spelling reaches the module it means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.exchange.convert import convert
from inweave.exchange.load import load
from inweave.formats.files import write_file
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.links import Naming
from inweave.targets.plan import Plan
from inweave.targets.resolve import resolve
from tests.support import array, hollow, tensor, zeros

NAMINGS: tuple[Naming, ...] = ("diffusers", "original")


def lora(module: str, out: int, width: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_down.weight": (rank, width), f"{module}.lora_up.weight": (out, rank)}


def adapter_of(shapes: dict[str, tuple[int, ...]]) -> Adapter:
    return read({key: hollow(shape) for key, shape in shapes.items()})


def place(shapes: dict[str, tuple[int, ...]], base: str, naming: Naming = "diffusers") -> Plan:
    return resolve(adapter_of(shapes), known_index(base, naming))


WRAPPERS = (
    "", "pipe.dit.", "dit.", "pipe.", "model.", "module.", "net.", "transformer.", "model.diffusion_model.",
    "diffusion_model.",
    "base_model.model.", "base_model.model.transformer.", "base_model.model.diffusion_model.",
    "base_model.model.model.",
    "module.diffusion_model.", "_orig_mod.", "transformer.base_model.model.", "pipe.dit.base_model.model.",
    "model.model.",
    "model.transformer.", "high_noise_model.",
)  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("module", ["blocks.3.self_attn.q", "blocks.3.attn1.to_q"])
def test_wrappers_in_front_of_a_module(wrapper: str, module: str) -> None:
    plan = place(lora(wrapper + module, 5120, 5120), "wan2.1-t2v-14b")
    assert [p.tensor for p in plan.placements] == ["blocks.3.attn1.to_q.weight"]
    assert plan.placements[0].component == "unet"


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_unet__", "lycoris_", "lora_transformer_",
        "lora_unet_model_diffusion_model_",
                                    "lora_unet_diffusion_model_", "lora_unet_model_"])  # fmt: skip
@pytest.mark.parametrize("module", ["blocks_3_self_attn_q", "blocks_3_attn1_to_q"])
def test_wrappers_in_front_of_a_flat_module(prefix: str, module: str) -> None:
    plan = place(lora(prefix + module, 5120, 5120), "wan2.1-t2v-14b")
    assert [p.tensor for p in plan.placements] == ["blocks.3.attn1.to_q.weight"]


@pytest.mark.parametrize(
    "wrapper", ["unet.", "model.diffusion_model.", "unet.base_model.model.", "base_model.model.unet.", "model."]
)
def test_wrappers_of_a_unet(wrapper: str) -> None:
    plan = place(lora(f"{wrapper}down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", 640, 640), "sdxl")
    assert len(plan.placements) == 1


def test_a_block_stack_is_no_wrapper() -> None:
    """`transformer_blocks_0` without its first word is a name of another family."""
    with pytest.raises(TargetError, match="no module of this name"):
        place(lora("lora_unet_transformer_blocks_0_attn1_to_q", 5120, 5120), "wan2.1-t2v-14b")


def test_a_thousand_wrappers_are_no_name() -> None:
    with pytest.raises(TargetError, match="no module of this name"):
        place(lora("model." * 5000 + "blocks.3.self_attn.q", 5120, 5120), "wan2.1-t2v-14b")


class TestTwoExperts:
    HIGH = lora("transformer.blocks.0.attn1.to_q", 5120, 5120)
    LOW = lora("transformer_2.blocks.0.attn1.to_q", 5120, 5120)

    @pytest.mark.parametrize(("high", "low"), [
        ("transformer.", "transformer_2."), ("high_noise_model.", "low_noise_model."), ("pipe.dit.", "pipe.dit2."),
        ("base_model.model.transformer.", "base_model.model.transformer_2."),
        ("lora_transformer_", "lora_transformer_2_"),
    ])  # fmt: skip
    @pytest.mark.parametrize("base", ["wan2.1-t2v-14b", "wan2.2-i2v-a14b"])
    def test_each_goes_to_its_own_network(self, high: str, low: str, base: str) -> None:
        flat = high.startswith("lora_")
        module = "blocks_0_attn1_to_q" if flat else "blocks.0.attn1.to_q"
        plan = place(lora(high + module, 5120, 5120) | lora(low + module, 5120, 5120), base)
        assert [(p.component, p.tensor) for p in plan.placements] == [
            ("unet", "blocks.0.attn1.to_q.weight"),
            ("unet2", "blocks.0.attn1.to_q.weight"),
        ]

    @pytest.mark.parametrize(("base", "naming"), [("wan2.1-t2v-1.3b", "diffusers"), ("wan2.1-t2v-14b", "original")])
    def test_a_base_with_one_denoiser_is_refused_by_name(self, base: str, naming: Naming) -> None:
        with pytest.raises(TargetError, match="two denoisers"):
            place(self.HIGH | self.LOW, base, naming)

    def test_the_second_expert_alone_goes_to_the_only_denoiser_with_a_warning(self) -> None:
        plan = place(self.LOW, "wan2.1-t2v-14b", "original")
        assert [p.component for p in plan.placements] == ["unet"]
        assert any("second denoiser" in warning for warning in plan.report.warnings)

    def test_only_a_dialect_with_two_denoisers_is_written(self, tmp_path: Path) -> None:
        values = {key: zeros(shape) for key, shape in (self.HIGH | self.LOW).items()}
        source = write_file(tmp_path / "two.safetensors", values)
        with pytest.raises(TargetError, match="one denoiser"):
            convert(source, tmp_path / "kohya.safetensors", to="kohya", base="wan2.1-t2v-14b")
        convert(source, tmp_path / "diffusers.safetensors", to="diffusers", base="wan2.1-t2v-14b")
        again = load(tmp_path / "diffusers.safetensors")
        assert {key.partition(".")[0] for key in again.tensors} == {"transformer", "transformer_2"}


class TestFused:
    @pytest.mark.parametrize(("base", "module", "parts", "shape"), [
        ("flux1-dev", "transformer_blocks.0.attn.to_qkv", ["to_q", "to_k", "to_v"], (9216, 3072)),
        ("flux1-dev", "transformer_blocks.0.attn.to_added_qkv", ["add_q_proj", "add_k_proj", "add_v_proj"],
            (9216, 3072)),
        ("flux1-dev", "transformer_blocks.0.attn.add_qkv_proj", ["add_q_proj", "add_k_proj", "add_v_proj"],
            (9216, 3072)),
        ("qwen-image", "transformer_blocks.59.attn.to_qkv", ["to_q", "to_k", "to_v"], (9216, 3072)),
        ("wan2.1-t2v-14b", "blocks.1.attn1.to_qkv", ["to_q", "to_k", "to_v"], (15360, 5120)),
        ("wan2.1-t2v-14b", "blocks.1.attn2.to_kv", ["to_k", "to_v"], (10240, 5120)),
        ("sdxl", "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_kv", ["to_k", "to_v"], (1280, 2048)),
    ])  # fmt: skip
    @pytest.mark.parametrize("flat", [False, True])
    def test_a_fused_projection_stacks_its_parts(
        self, base: str, module: str, parts: list[str], shape: tuple[int, int], flat: bool
    ) -> None:
        name = f"lora_unet_{module.replace('.', '_')}" if flat else f"transformer.{module}"
        plan = place(lora(name, *shape), base)
        stem = module.rpartition(".")[0]
        assert [p.tensor for p in plan.placements] == [f"{stem}.{part}.weight" for part in parts]
        starts = [p.source[0] for p in plan.placements if p.source]
        assert starts == [shape[0] // len(parts) * i for i in range(len(parts))]

    def test_queries_of_another_width_are_not_stacked(self) -> None:
        with pytest.raises(TargetError, match="no module of this name"):
            place(lora("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_qkv", 1920, 640), "sdxl")

    @pytest.mark.parametrize(("leaf", "rows", "parts"), [("linear1_qkv", 9216, 3), ("linear1_mlp", 12288, 1)])
    @pytest.mark.parametrize("naming", NAMINGS)
    def test_a_part_of_linear1(self, leaf: str, rows: int, parts: int, naming: Naming) -> None:
        plan = place(lora(f"diffusion_model.single_blocks.5.{leaf}", rows, 3072), "flux1-dev", naming)
        if naming == "original":
            start = 0 if leaf == "linear1_qkv" else 9216
            assert [p.target for p in plan.placements] == [(start, rows)]
        else:
            assert len(plan.placements) == parts

    def test_values_of_a_fused_file_are_split_by_rows(self, tmp_path: Path) -> None:
        up = [[float(row)] for row in range(9216)]
        file = write_file(tmp_path / "fused.safetensors", {
            "transformer.transformer_blocks.0.attn.to_qkv.lora_A.weight": tensor([[1.0] * 3072]),
            "transformer.transformer_blocks.0.attn.to_qkv.lora_B.weight": tensor(up),
        })  # fmt: skip
        convert(file, tmp_path / "split.safetensors", to="diffusers", base="flux1-dev")
        split = load(tmp_path / "split.safetensors").tensors
        for number, leaf in enumerate(("to_q", "to_k", "to_v")):
            rows = array(split[f"transformer.transformer_blocks.0.attn.{leaf}.lora_B.weight"])
            assert rows[0, 0] == 3072 * number


class TestBareParameters:
    @pytest.mark.parametrize("name", [
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale.diff",
        "double_blocks.0.img_attn.norm.query_norm.scale.diff",
        "lora_unet_double_blocks_0_img_attn_norm_query_norm_scale.diff",
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff",
        "transformer.transformer_blocks.0.attn.norm_q.weight.diff",
    ])  # fmt: skip
    def test_the_change_of_a_norm(self, name: str) -> None:
        plan = place({name: (128,)}, "flux1-dev")
        assert [p.tensor for p in plan.placements] == ["transformer_blocks.0.attn.norm_q.weight"]

    @pytest.mark.parametrize("name", [
        "diffusion_model.blocks.0.modulation.diff", "diffusion_model.blocks.0.diff_m", "lora_unet_blocks_0.diff_m",
        "blocks.0.scale_shift_table.diff",
    ])  # fmt: skip
    def test_the_change_of_a_modulation(self, name: str) -> None:
        plan = place({name: (1, 6, 5120)}, "wan2.1-t2v-14b")
        assert [p.tensor for p in plan.placements] == ["blocks.0.scale_shift_table"]

    @pytest.mark.parametrize(
        "name", ["diffusion_model.blocks.0.self_attn.q.diff_b", "diffusion_model.blocks.0.self_attn.q.bias.diff"]
    )
    def test_the_change_of_a_bias(self, name: str) -> None:
        plan = place({name: (5120,)}, "wan2.1-t2v-14b")
        assert [p.tensor for p in plan.placements] == ["blocks.0.attn1.to_q.bias"]


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_", "pipe.dit.", ""])
@pytest.mark.parametrize(("module", "tensor_name", "shape"), [
    ("vace_blocks.2.self_attn.q", "vace_blocks.2.attn1.to_q.weight", (5120, 5120)),
    ("vace_blocks.2.before_proj", None, (5120, 5120)),
    ("vace_blocks.2.after_proj", "vace_blocks.2.proj_out.weight", (5120, 5120)),
    ("vace_patch_embedding", "vace_patch_embedding.weight", (5120, 96 * 4)),
])  # fmt: skip
def test_vace(prefix: str, module: str, tensor_name: str | None, shape: tuple[int, int]) -> None:
    name = prefix + (module.replace(".", "_") if prefix == "lora_unet_" else module)
    if tensor_name is None:  # only the first block projects its input
        with pytest.raises(TargetError):
            place(lora(name, *shape), "wan2.1-vace-14b")
        return
    plan = place(lora(name, *shape), "wan2.1-vace-14b")
    assert [p.tensor for p in plan.placements] == [tensor_name]


def test_every_tensor_is_placed_or_named(tmp_path: Path) -> None:
    """Two experts, a fused projection, a norm, a foreign key: nothing disappears."""
    shapes = {
        **lora("transformer.blocks.0.attn1.to_qkv", 15360, 5120),
        **lora("transformer_2.blocks.0.attn1.to_q", 5120, 5120),
        "transformer.blocks.0.attn1.norm_q.weight.diff": (5120,), "something.else": (3,), **lora("image_proj.x", 4, 4),
    }  # fmt: skip
    report = resolve(adapter_of(shapes), known_index("wan2.1-t2v-14b"), strict=False).report
    names = {key for findings in report.findings().values() for finding in findings for key in finding.keys}
    assert report.placed + len(names) == report.tensors == len(shapes)
    assert json.dumps([finding.as_dict() for finding in report.unplaced])
