"""Traps of scale and formula: which weights a number in a file multiplies, and which it leaves alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import inweave
from inweave.adapter import Lora, Tensor
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.targets.links import Naming
from tests.golden.weave import NAMINGS, Base, close, golden, known, lora, numbers, pack, product, small, torch_base
from tests.support import random, tensor, write

BASE = torch_base({"net.proj.weight": (6, 5), "net.proj.bias": (6,), "net.square.weight": (5, 5)})
CONV = torch_base({"net.conv.weight": (6, 4, 3, 3), "net.even.weight": (6, 6, 3, 3)})
PROJ, CONVOLVED = "net.proj.weight", "net.conv.weight"


def of(base: Base, tensors: dict[str, Tensor], name: str = PROJ, **options: object) -> torch.Tensor:
    return base.changes(read(tensors, **options))[name]  # type: ignore[arg-type]


def peft_config(**fields: object) -> dict[str, object]:
    return {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **fields}


@pytest.mark.parametrize(
    ("module", "spelling"), [("lora_unet_net_proj", "kohya"), ("net.proj", "peft"), ("unet.net.proj", "dotted")]
)
def test_missing_alpha_is_scale_one(module: str, spelling: str) -> None:
    pair = lora(module, 6, 5, spelling=spelling)
    close(of(BASE, pair), product(pair))


def test_a_configuration_supplies_a_missing_alpha() -> None:
    pair = lora("unet.net.proj", 6, 5, spelling="peft")
    packed = json.dumps({"unet.r": 3, "unet.lora_alpha": 6})
    close(of(BASE, pair, metadata={"lora_adapter_metadata": packed}), 2 * product(pair))
    pair = lora("base_model.model.net.proj", 6, 5, spelling="peft")
    close(of(BASE, pair, config=peft_config()), 2 * product(pair))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64"]
)
def test_alpha_of_any_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    pair = lora("lora_unet_net_proj", 6, 5, 4)
    alpha = pack(torch.full(shape, 3.0).to(getattr(torch, dtype)))
    close(of(BASE, pair | {"lora_unet_net_proj.alpha": alpha}), 0.75 * product(pair))


@pytest.mark.parametrize(("written", "stored"), [(301.0, 300.0), (0.3, 0.30078125)])
def test_a_rounded_alpha_is_not_repaired(written: float, stored: float) -> None:
    alpha = pack(torch.tensor(written).bfloat16())
    adapter = read(lora("lora_unet_net_proj", 6, 5, 4) | {"lora_unet_net_proj.alpha": alpha})
    assert adapter.entries[0].factors.alpha == stored
    assert adapter.entries[0].factors.scale == stored / 4


def test_alpha_zero_is_scale_one_and_reported() -> None:
    pair = lora("lora_unet_net_proj", 6, 5, alpha=0.0)
    adapter = read(pair)
    assert any("alpha 0" in warning for warning in adapter.warnings)
    close(BASE.changes(adapter)[PROJ], product(pair))


def test_alpha_zero_of_a_rotation_is_no_constraint() -> None:
    blocks = {"lora_unet_net_proj.oft_blocks": random(1, 2, 3, 3)}
    still = read(blocks | {"lora_unet_net_proj.alpha": tensor(0.0)})
    assert not still.warnings
    close(BASE.changes(still)[PROJ], of(BASE, blocks))


@pytest.mark.parametrize("name", ["lycoris_lora_linear_rslora", "lycoris_glora_linear_rslora", "lycoris_glora_linear"])
def test_rs_lora_as_each_library_saves_it(name: str) -> None:
    """LyCORIS folds it into the saved alpha, except for GLoRA."""
    adapter, base, expected = golden(name)
    close(base.merged(adapter)["test.weight"], expected["test.weight"], 3e-6)


def test_peft_divides_by_the_root_of_the_rank() -> None:
    pair = lora("base_model.model.net.proj", 6, 5, spelling="peft")
    close(of(BASE, pair, config=peft_config(use_rslora=True)), 6 / math.sqrt(3) * product(pair))
    packed = json.dumps({"unet.r": 3, "unet.lora_alpha": 6, "unet.use_rslora": True})
    pair = lora("unet.net.proj", 6, 5, spelling="peft")
    close(of(BASE, pair, metadata={"lora_adapter_metadata": packed}), 6 / math.sqrt(3) * product(pair))


def lokr(alpha: float) -> tuple[dict[str, Tensor], torch.Tensor]:
    value = {"lora_unet_net_proj.lokr_w1": random(1, 2, 5), "lora_unet_net_proj.lokr_w2": random(2, 3, 1)}
    expected = torch.kron(*map(numbers, value.values()))
    return value | {"lora_unet_net_proj.alpha": tensor(alpha)}, expected


@pytest.mark.parametrize(("dim", "scale"), [(None, 1.0), ("2", 1.0), ("8", 0.25)])
def test_full_lokr_has_no_rank(dim: str | None, scale: float) -> None:
    """Its scale is 1, unless the file records a dimension other than alpha: then its trainer divided by it."""
    tensors, expected = lokr(2.0)
    adapter = read(tensors, {"ss_network_dim": dim} if dim else {})
    assert any("ss_network_dim" in warning for warning in adapter.warnings) == (scale != 1)
    close(BASE.changes(adapter)[PROJ], scale * expected)


@pytest.mark.parametrize("name", ["peft_lokr_full", "peft_lokr", "lycoris_lokr_linear_both_full"])
def test_peft_scales_full_lokr_all_the_same(name: str) -> None:
    adapter, base, expected = golden(name)
    for key, after in base.merged(adapter).items():
        close(after, expected[key], 3e-6)


def test_tucker_lokr_takes_its_rank_from_w2_b() -> None:
    core, a, b, left = random(1, 2, 2, 3, 3), random(2, 2, 3), random(3, 2, 4), random(4, 2, 1)
    tensors = dict(zip(("lokr_t2", "lokr_w2_a", "lokr_w2_b", "lokr_w1"), (core, a, b, left), strict=True))
    tensors = {f"lora_unet_net_conv.{role}": value for role, value in tensors.items()}
    right = torch.einsum("abhw,ao,bi->oihw", numbers(core), numbers(a), numbers(b))
    expected = torch.einsum("pq,oihw->poqihw", numbers(left), right).reshape(6, 4, 3, 3)
    change = of(CONV, tensors | {"lora_unet_net_conv.alpha": tensor(5.0)}, CONVOLVED)
    close(change, 5 / 2 * expected)


def test_tucker_loha_is_stored_transposed() -> None:
    one = {"t1": random(1, 5, 5, 3, 3), "w1_a": random(2, 5, 6), "w1_b": random(3, 5, 4)}
    two = {"t2": random(4, 5, 5, 3, 3), "w2_a": random(5, 5, 6), "w2_b": random(6, 5, 4)}
    left, right = (torch.einsum("abhw,ao,bi->oihw", *map(numbers, part.values())) for part in (one, two))
    tensors = {f"lora_unet_net_conv.hada_{role}": value for role, value in (one | two).items()}
    change = of(CONV, tensors | {"lora_unet_net_conv.alpha": tensor(2.0)}, CONVOLVED)
    close(change, 2 / 5 * left * right)


def test_loha_stored_as_convolutions() -> None:
    shapes = {"w1_a": (6, 2, 1, 1), "w1_b": (2, 4, 3, 3), "w2_a": (6, 2, 1, 1), "w2_b": (2, 4, 3, 3)}
    parts = {role: random(seed, *shape) for seed, (role, shape) in enumerate(shapes.items())}
    a, b, c, d = (numbers(part).flatten(1) for part in parts.values())
    tensors = {f"lora_unet_net_conv.hada_{role}": value for role, value in parts.items()}
    change = of(CONV, tensors | {"lora_unet_net_conv.alpha": tensor(3.0)}, CONVOLVED)
    close(change, 3 / 2 * ((a @ b) * (c @ d)).reshape(6, 4, 3, 3))


@pytest.mark.parametrize("naming", NAMINGS)
def test_april_2023_lokr_splits_the_kernel_over_both_factors(naming: Naming) -> None:
    left, right = random(1, 16, 48), random(2, 20, 60)
    module = "lora_unet_down_blocks_0_resnets_0_conv1"
    (change,) = known("sd1.5", naming).changes({f"{module}.lokr_w1": left, f"{module}.lokr_w2": right}).values()
    close(change, torch.kron(numbers(left), numbers(right)).reshape(320, 320, 3, 3))


def decomposed(weight: torch.Tensor, change: torch.Tensor, magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    """V * magnitude / |V|, V = W + delta, one norm for every index of ``axis``."""
    changed = weight + change
    value = changed.clone()
    for n in range(changed.shape[axis]):
        part = changed.select(axis, n)
        value.select(axis, n).copy_(part / part.pow(2).sum().sqrt() * magnitude.flatten()[n])
    return value


@pytest.mark.parametrize(
    ("name", "suffix", "shape", "axis"),
    [
        (PROJ, "dora_scale", (6, 1), 0),
        (PROJ, "dora_scale", (1, 5), 1),
        (PROJ, "dora_scale", (6,), 0),
        (PROJ, "lora_magnitude_vector", (6,), 0),
        (PROJ, "lora_magnitude_vector.weight", (6,), 0),
        (PROJ, "lora_magnitude_vector.default.weight", (6,), 0),
        (PROJ, "magnitude", (6,), 0),
        ("net.square.weight", "dora_scale", (5,), 0),
        ("net.square.weight", "dora_scale", (5, 1), 0),
        ("net.square.weight", "dora_scale", (1, 5), 1),
        (CONVOLVED, "dora_scale", (6, 1, 1, 1), 0),
        (CONVOLVED, "dora_scale", (1, 4, 1, 1), 1),
        (CONVOLVED, "lora_magnitude_vector", (1, 6, 1, 1), 0),
        ("net.even.weight", "dora_scale", (1, 6, 1, 1), 1),
        ("net.even.weight", "lora_magnitude_vector", (1, 6, 1, 1), 0),
    ],
)
def test_dora_axis_by_name_and_shape(name: str, suffix: str, shape: tuple[int, ...], axis: int) -> None:
    """PEFT stores a convolution's (1, out, 1, 1), LyCORIS' input axis looks the same: the key's name decides."""
    base = BASE if name in BASE.index.components["model"].tensors else CONV
    out, into, *kernel = base[name].shape
    module = name.removesuffix(".weight")
    pair = lora(module, out, into, kernel=kernel, alpha=2.0)
    magnitude = random(9, *shape)
    after = base.merged(pair | {f"{module}.{suffix}": magnitude})[name]
    delta = 2 / 3 * product(pair).reshape(base[name].shape)
    close(after, decomposed(base[name], delta, numbers(magnitude), axis))


def test_peft_dora_as_peft_merges_it() -> None:
    adapter, base, expected = golden("peft_lora_dora")
    merged = base.merged(adapter)
    assert {"conv.weight", "conv1.weight", "lin.weight", "sq.weight"} <= set(merged)
    for key, after in merged.items():
        close(after, expected[key], 3e-6)


@pytest.mark.parametrize(("shape", "axis"), [((8, 1), 0), ((1, 8), 1)])
def test_dora_norm_is_taken_on_the_slice(shape: tuple[int, ...], axis: int) -> None:
    """`to_k` on a fused base: only its rows count, whichever the axis."""
    base, name = small("flux1-dev", "original"), "double_blocks.0.img_attn.qkv.weight"
    module = "transformer.transformer_blocks.0.attn.to_k"
    pair, magnitude = lora(module, 8, 8, alpha=2.0), random(5, *shape)
    after = base.merged(pair | {f"{module}.dora_scale": magnitude})[name]
    expected = base[name].clone()
    expected[8:16] = decomposed(base[name][8:16], 2 / 3 * product(pair), numbers(magnitude), axis)
    close(after, expected)


@pytest.mark.parametrize(("shape", "axis"), [((24, 1), 0), ((1, 8), 1)])
def test_dora_of_a_fused_layer_sees_all_its_rows(shape: tuple[int, ...], axis: int) -> None:
    """`qkv` on a split base: an input-axis norm still runs over q, k and v together."""
    base, module = small("flux1-dev", "diffusers"), "lora_unet_double_blocks_0_img_attn_qkv"
    names = [f"transformer_blocks.0.attn.to_{leaf}.weight" for leaf in "qkv"]
    pair, magnitude = lora(module, 24, 8, alpha=2.0), random(5, *shape)
    merged = base.merged(pair | {f"{module}.dora_scale": magnitude})
    whole = torch.cat([base[name] for name in names])
    expected = decomposed(whole, 2 / 3 * product(pair), numbers(magnitude), axis)
    close(torch.cat([merged[name] for name in names]), expected)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, -0.7])
def test_dora_strength_goes_from_the_base_to_the_decomposed_weight(strength: float) -> None:
    pair, magnitude = lora("net.proj", 6, 5, alpha=2.0), random(5, 6, 1)
    after = BASE.merged(pair | {"net.proj.dora_scale": magnitude}, strength)[PROJ]
    goal = decomposed(BASE[PROJ], 2 / 3 * product(pair), numbers(magnitude), 0)
    close(after, BASE[PROJ] + strength * (goal - BASE[PROJ]))


@pytest.mark.parametrize("suffix", ["dora_scale", "lora_magnitude_vector", "magnitude"])
def test_a_one_dimensional_magnitude_is_one_number_per_row(suffix: str) -> None:
    """Broadcast as stored, it would scale the columns of a square weight, or fail on any other."""
    magnitude = pack(torch.arange(1.0, 6.0))
    pair = lora("net.square", 5, 5, alpha=2.0)
    after = BASE.merged(pair | {f"net.square.{suffix}": magnitude})["net.square.weight"]
    close(after.norm(dim=1), torch.arange(1.0, 6.0).double())
    assert not torch.allclose(after.norm(dim=0), torch.arange(1.0, 6.0).double())


def rotation(blocks: torch.Tensor, limit: float, strength: float = 1.0) -> torch.Tensor:
    """blockdiag(R)^T, the matrix to the left of the weight."""
    skew = blocks - blocks.mT
    norm = skew.norm()
    skew = skew * limit / norm if 0 < limit < norm else skew
    eye = torch.eye(blocks.shape[1], dtype=torch.float64)
    turns = [strength * ((eye + q) @ torch.linalg.inv(eye - q)) + (1 - strength) * eye for q in skew]
    return torch.block_diag(*(turn.T for turn in turns))


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("alpha", [0.01, 100.0])
def test_oft_constraint_grows_with_the_outputs_and_strength_counts_once(alpha: float, strength: float) -> None:
    blocks, rescale = random(1, 2, 3, 3), random(2, 6, 1)
    tensors = {"oft_blocks": blocks, "rescale": rescale, "alpha": tensor(alpha)}
    change = BASE.merged({f"lora_unet_net_proj.{role}": value for role, value in tensors.items()}, strength)[PROJ]
    limit = float(torch.tensor(alpha)) * 6
    assert (limit < (numbers(blocks) - numbers(blocks).mT).norm()) == (alpha < 1)
    close(change, numbers(rescale) * (rotation(numbers(blocks), limit, strength) @ BASE[PROJ]))


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("name", ["oft_linear", "oft_conv3", "oft_linear_rescaled", "boft_linear", "boft_conv3"])
def test_rotations_as_lycoris_merges_them(name: str, strength: float) -> None:
    adapter, base, expected = golden(f"lycoris_{name}", strength)
    close(base.merged(adapter, strength)["test.weight"], expected["test.weight"], 3e-6)


@pytest.mark.parametrize("naming", NAMINGS)
def test_kohya_flux_oft_has_one_constraint_per_part(naming: Naming) -> None:
    base, module = small("flux1-dev", naming), "oft_unet_double_blocks_0_img_attn_qkv"
    parts = [random(seed, 2, 4, 4) for seed in range(3)]
    tensors = {f"{module}.oft_blocks.{n}": part for n, part in enumerate(parts)} | {f"{module}.alpha": tensor(0.01)}
    merged = base.merged(tensors)
    if naming == "original":
        before, after = base["double_blocks.0.img_attn.qkv.weight"], merged["double_blocks.0.img_attn.qkv.weight"]
    else:
        names = [f"transformer_blocks.0.attn.to_{leaf}.weight" for leaf in "qkv"]
        before, after = torch.cat([base[n] for n in names]), torch.cat([merged[n] for n in names])
    turn = torch.block_diag(*(rotation(numbers(part), float(torch.tensor(0.01)) * 8) for part in parts))
    close(after, turn @ before)


@pytest.mark.parametrize("spread", [False, True])
def test_peft_oft_rotates_inputs(spread: bool) -> None:
    """The blocks are stored as upper triangles; OneTrainer's marker divides the entries by 2 * sqrt(b - 1)."""
    entries = random(3, 1, 10)
    skew = torch.zeros(5, 5, dtype=torch.float64)
    skew[*torch.triu_indices(5, 5, 1)] = numbers(entries)[0] / (4 if spread else 1)
    skew = skew - skew.T
    eye = torch.eye(5, dtype=torch.float64)
    tensors = {"base_model.model.net.proj.oft_R.weight": entries}
    if spread:
        tensors["base_model.model.net.proj.oft_R.scaled_oft"] = tensor(1.0)
    config = {"peft_type": "OFT", "r": 0, "oft_block_size": 5, "use_cayley_neumann": False}
    after = BASE.merged(read(tensors, config=config))[PROJ]
    close(after, BASE[PROJ] @ ((eye - skew) @ torch.linalg.inv(eye + skew)).T)


@pytest.mark.parametrize("name", ["peft_oft", "peft_oft_share", "peft_boft"])
def test_rotations_as_peft_merges_them(name: str) -> None:
    adapter, base, expected = golden(name)
    for key, after in base.merged(adapter).items():
        close(after, expected[key], 1e-5)


@pytest.mark.parametrize("on_input", [False, True])
def test_ia3_offset_and_factor(on_input: bool) -> None:
    """LyCORIS stores what is added to one, PEFT the factor itself, which scales the bias as well."""
    vector = random(1, 5) if on_input else random(1, 6)
    along = numbers(vector)[None, :] if on_input else numbers(vector)[:, None]
    offset = {"lora_unet_net_proj.weight": vector, "lora_unet_net_proj.on_input": tensor(int(on_input), "I64")}
    merged = BASE.merged(offset)
    close(merged[PROJ], BASE[PROJ] * (1 + along))
    assert set(merged) == {PROJ}
    factor = {"base_model.model.net.proj.ia3_l": vector.reshaped((1, 5) if on_input else (6, 1))}
    feedforward = ["proj"] if on_input else []
    merged = BASE.merged(read(factor, config={"peft_type": "IA3", "feedforward_modules": feedforward}))
    close(merged[PROJ], BASE[PROJ] * along)
    assert ("net.proj.bias" in merged) == (not on_input)
    if not on_input:
        close(merged["net.proj.bias"], BASE["net.proj.bias"] * numbers(vector))


@pytest.mark.parametrize(
    "name", ["lycoris_ia3_linear_in", "lycoris_ia3_linear_out", "lycoris_ia3_conv3_out", "peft_ia3"]
)
def test_ia3_as_its_trainers_merge_it(name: str) -> None:
    adapter, base, expected = golden(name)
    merged = base.merged(adapter)
    assert merged
    for key, after in merged.items():
        close(after, expected[key], 3e-6)


def test_the_sparse_bias_is_a_residual_of_the_weight() -> None:
    pair = lora("lora_unet_net_conv", 6, 4, kernel=(3, 3), alpha=2.0)
    indices, values = torch.tensor([[0, 2, 5], [1, 35, 7]]), random(3, 3)
    residual = {"bias_indices": pack(indices), "bias_values": values, "bias_size": pack(torch.tensor([6, 36]))}
    tensors = pair | {f"lora_unet_net_conv.{role}": value for role, value in residual.items()}
    dense = torch.zeros(6, 36, dtype=torch.float64)
    dense[indices[0], indices[1]] = numbers(values)
    changes = CONV.changes(tensors)
    assert set(changes) == {CONVOLVED}
    close(changes[CONVOLVED], 2 / 3 * (product(pair) + dense).reshape(6, 4, 3, 3))


@pytest.mark.parametrize("exact", [False, True])
def test_split_qkv_is_scaled_as_loaders_do_by_default(exact: bool) -> None:
    base = small("flux1-dev", "original")
    modules = {
        "double_blocks_0_img_attn_qkv": (24, 3),
        "single_blocks_0_linear1": (56, 4),
        "double_blocks_0_img_mlp_0": (32, 1),
    }
    pairs = {name: lora(f"lora_unet_{name}", out, 8, 2 * parts, alpha=3.0) for name, (out, parts) in modules.items()}
    metadata = {"ss_network_args": json.dumps({"split_qkv": "True"})}
    adapter = read({k: t for pair in pairs.values() for k, t in pair.items()}, metadata, trainer_exact=exact)
    assert any("split_qkv" in warning for warning in adapter.warnings)
    changes = base.changes(adapter)
    for name, (_, parts) in modules.items():
        tensor_name = next(key for key in changes if key.replace(".", "_").startswith(name))
        close(changes[tensor_name], 3.0 / (2 if exact else 2 * parts) * product(pairs[name]))


def test_converting_a_block_sparse_qkv_keeps_the_loaders_scale(tmp_path: Path) -> None:
    """Each part takes its own rank block, and alpha is divided with the rank."""
    module, rank = "lora_unet_double_blocks_0_img_attn_qkv", 2
    pair = lora(module, 9216, 3072, 3 * rank, alpha=3.0)
    dense, sparse = numbers(pair[f"{module}.lora_up.weight"]).float(), torch.zeros(9216, 3 * rank)
    for n in range(3):
        region = slice(n * 3072, (n + 1) * 3072), slice(n * rank, (n + 1) * rank)
        sparse[region] = dense[region]
    pair[f"{module}.lora_up.weight"] = pack(sparse)
    metadata = {"ss_network_args": json.dumps({"split_qkv": "True"})}
    source = write(tmp_path / "in.safetensors", pair, metadata)
    inweave.convert(source, tmp_path / "out.safetensors", to="diffusers", base="flux1-dev")
    for n, entry in enumerate(
        sorted(inweave.load(tmp_path / "out.safetensors"), key=lambda e: "qkv".index(e.ref.name[-1]))
    ):
        factors = entry.factors
        assert isinstance(factors, Lora)
        assert (factors.rank, factors.alpha, factors.scale) == (rank, 1.0, 0.5)
        block = slice(n * rank, (n + 1) * rank)
        assert torch.equal(numbers(factors.down), numbers(pair[f"{module}.lora_down.weight"])[block])
        assert torch.equal(numbers(factors.up), sparse[n * 3072 : (n + 1) * 3072, block].double())


def test_mixed_ranks_without_alpha_are_all_scale_one() -> None:
    pairs = [lora("unet.net.proj", 6, 5, 2, spelling="peft"), lora("unet.net.square", 5, 5, 4, spelling="peft")]
    changes = BASE.changes(pairs[0] | pairs[1])
    close(changes[PROJ], product(pairs[0]))
    close(changes["net.square.weight"], product(pairs[1]))


def test_the_alpha_of_the_keys_wins_over_the_networks() -> None:
    """Rank edits (resize, lora_reg_dims) leave ss_network_dim and ss_network_alpha behind."""
    metadata = {"ss_network_dim": "32", "ss_network_alpha": "16"}
    pair = lora("lora_unet_net_proj", 6, 5, 4, alpha=3.0)
    close(of(BASE, pair, metadata=metadata), 3 / 4 * product(pair))
    pair = lora("lora_unet_net_proj", 6, 5, 4)
    close(of(BASE, pair, metadata=metadata), product(pair))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_tensors_are_widened_before_any_arithmetic(dtype: torch.dtype) -> None:
    down, up = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).to(dtype),
        torch.ones(6, 4).mul(0.375).to(dtype),
    )
    names = ("lora_down.weight", "lora_up.weight", "alpha")
    stored = (pack(down), pack(up), pack(torch.tensor(3.0).to(dtype)))
    tensors = {f"lora_unet_net_proj.{name}": value for name, value in zip(names, stored, strict=True)}
    close(of(BASE, tensors), 0.75 * up.double() @ down.double())


SMALL = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"


def underflowing() -> dict[str, Tensor]:
    """float16 factors near the end of its range: any fold of 3 / 16 loses bits."""
    module = "lora_unet_" + SMALL.replace(".", "_")
    pair = lora(module, 320, 768, 16, alpha=3.0, dtype="F16")
    tiny = numbers(pair[f"{module}.lora_up.weight"]).mul(1e-5).half()
    assert tiny.count_nonzero() and not torch.equal((tiny * (3 / 16)).double() * 16 / 3, tiny.double())
    return pair | {f"{module}.lora_up.weight": pack(tiny)}


@pytest.mark.parametrize("dialect", ["kohya", "diffusers", "peft", "comfy", "onetrainer", "candle"])
def test_converting_never_folds_alpha(dialect: str, tmp_path: Path) -> None:
    source = underflowing()
    out = tmp_path / ("out" if dialect == "peft" else "out.safetensors")
    inweave.convert(write(tmp_path / "in.safetensors", source), out, to=dialect, base="sd1.5")
    again = inweave.load(out)
    (entry,) = again.entries
    before = read(source).entries[0].factors
    assert {role: bytes(t.data) for role, t in entry.factors.tensors().items()} == {
        role: bytes(t.data) for role, t in before.tensors().items()
    }
    assert entry.factors.scale == 3 / 16
    close(1e6 * known("sd1.5").changes(again)[f"{SMALL}.weight"], 1e6 * 3 / 16 * product(source))
    if dialect == "diffusers":
        saved_config = json.loads(again.metadata["lora_adapter_metadata"])
        assert (saved_config["unet.lora_alpha"], saved_config["unet.r"]) == (3, 16)
    if dialect == "peft":
        saved_config = json.loads((out / "adapter_config.json").read_text())
        assert (saved_config["lora_alpha"], saved_config["r"]) == (3, 16)


def test_a_dialect_without_scaling_refuses(tmp_path: Path) -> None:
    module = "lora_unet_double_blocks_0_img_attn_proj"
    source = write(tmp_path / "in.safetensors", lora(module, 3072, 3072, 4, alpha=3.0, dtype="F16"))
    with pytest.raises(TargetError, match="alpha 3"):
        inweave.convert(source, tmp_path / "out.safetensors", to="bfl", base="flux1-dev")
