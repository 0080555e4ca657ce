"""Adapter files of strangers: bounded time and memory, our errors only, short texts."""

from __future__ import annotations

import itertools
import json
import random as pseudo
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import inweave
from inweave.adapter import Tensor
from inweave.cli.app import app
from inweave.errors import FormatError, InweaveError
from inweave.exchange.convert import rewrite
from inweave.formats.dialects import WRITTEN
from inweave.formats.files import write_file
from inweave.formats.gate import MAX_METADATA, parse_header
from inweave.formats.read import read
from inweave.targets.index import ModelIndex, index_from_names
from tests.support import random, sized, stopwatch, zeros

#: (name of a tensor by its number, shape): each once took time that grows with the square of the number
CROWDS = {
    "alphas": (lambda n: [f"lora_unet_m{i}.alpha" for i in range(n)], ()),
    "ids of one struct": (lambda n: [f"lora_llama.{c}{i}.weight" for i in range(n // 2) for c in "ab"], (1, 1)),
    "parts of one module": (lambda n: [f"oft_unet_x.oft_blocks.{i}" for i in range(n)], (1, 1, 1)),
    "halves of VeRA": (
        lambda n: (
            [f"base_model.m{i}.vera_A" for i in range(n // 2)]
            + [f"base_model.model.m{i}.vera_lambda_{c}" for i in range(n // 4) for c in "bd"]
        ),
        (1,),
    ),
    "adapter names": (lambda n: [f"m.lora_A.n{i}.weight" for i in range(n)], (1, 1)),
    "duplicates": (
        lambda n: [f"{p}m{i}.lora_down.weight" for i in range(n // 2) for p in ("unet.", "module.unet.")],
        (1, 1),
    ),
}


def seconds(names: Iterable[str], shape: tuple[int, ...], index: ModelIndex) -> float:
    tensors = {name: zeros(shape) for name in names}
    with stopwatch(time.process_time) as cost:
        try:
            inweave.check(read(tensors), index, values="none")
        except FormatError as error:
            assert len(str(error)) < 1000
    return cost.seconds


@pytest.mark.sample(3)
@pytest.mark.parametrize("crowd", CROWDS)
def test_time_grows_with_the_number_of_tensors(crowd: str) -> None:
    names, shape = CROWDS[crowd]
    index = index_from_names({f"m{i}.weight": (2, 2) for i in range(200)}, source="x")
    seconds(names(500), shape, index)  # warm
    small, large = sized(1_500, 10_000), sized(12_000, 80_000)
    first = min(seconds(names(small), shape, index) for _ in range(2))
    assert seconds(names(large), shape, index) < 24 * max(first, 0.01)  # 8 times as many; a square would be 64 times


def header(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":[' + b"[]," * 250_000 + b"[]]}", "at most"),
        (b'{"a":[' + b"{}," * 250_000 + b"{}]}", "at most"),
        (b'{"a":[' + b"1," * 1_300_000 + b"1]}", "at most"),
        (header({"__metadata__": {f"k{i}": "" for i in range(MAX_METADATA + 1)}}), "metadata"),
    ],
)  # fmt: skip
def test_a_header_of_too_many_values_is_refused_before_it_takes_memory(raw: bytes, reason: str) -> None:
    parse_header(b"{}", 10)
    tracemalloc.start()
    with pytest.raises(FormatError, match=reason):
        parse_header(raw, 8 + len(raw))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(raw) + 1_000_000


def test_metadata_that_holds_json_counts_as_text() -> None:
    raw = header({"__metadata__": {"ss_tag_frequency": "[{}," * 200_000 + '\\"'}})
    assert len(parse_header(raw, 8 + len(raw)).metadata) == 1


def test_an_index_of_many_values_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map":{},"x":[' + "{}," * 1_100_000 + "{}]}")
    tracemalloc.start()
    with pytest.raises(FormatError, match="at most"):
        inweave.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * path.stat().st_size


@pytest.mark.parametrize(
    "value",
    ['{"a": 1e999}', '{"a": -1e999}', '{"a": NaN}', "[" * 500 + "]" * 500, "[" * 90_000, '{"a": ' + "1" * 5000 + "}",
     '{"a": "\\ud800"}', '["\\udfff"]', "{" + '"a":{' * 300 + "}" * 301, "[" + "{}," * 400_000 + "{}]"],
)  # fmt: skip
@pytest.mark.parametrize(
    "key", ["ss_network_args", "ss_tag_frequency", "software", "lora_adapter_metadata", "inweave.alpha"]
)
def test_hostile_json_in_metadata_is_printed_as_json(tmp_path: Path, value: str, key: str) -> None:
    tensors = {"lora_unet_x.lora_down.weight": random(1, 2, 3), "lora_unet_x.lora_up.weight": random(2, 3, 2)}
    path = write_file(tmp_path / "a.safetensors", tensors, {key: value})
    for arguments in (["inspect", str(path), "--json"], ["inspect", str(path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output[:200]
        if "--json" in arguments:
            json.loads(result.output, parse_constant=lambda name: pytest.fail(name))


SHAPES = ((), (1,), (3,), (0,), (2, 3), (3, 2), (0, 2), (2, 0), (2, 3, 1), (2, 2, 3, 3), (3, 2, 1, 1), (2, 3, 1, 1, 1))
SETS = (
    ("lora_up.weight", "lora_down.weight", "dora_scale"),
    ("lora_up.weight", "lora_down.weight", "lora_mid.weight"),
    ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"),
    ("lora_A.weight", "lora_B.weight", "lora_B.bias"),
    ("lora_embedding_A", "lora_embedding_B", "alpha"),
    ("lokr_w1", "lokr_w2", "dora_scale"),
    ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    ("lokr_w1_a", "lokr_w1_b", "lokr_w2"),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "dora_scale"),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight"),
    ("oft_blocks", "rescale", "alpha"),
    ("oft_R.weight", "oft_R.scaled_oft"),
    ("boft_R", "boft_s"),
    ("weight", "on_input"),
    ("ia3_l", "scale"),
    ("diff", "diff_b", "dora_scale", "reshape_weight"),
    ("w_norm", "b_norm"),
    ("vera_lambda_b", "vera_lambda_d"),
    ("bias_indices", "bias_values", "bias_size", "lora_up.weight", "lora_down.weight"),
)


def survives(tensors: dict[str, Tensor], index: ModelIndex) -> None:
    """Read, checked and written in every dialect, with our errors only."""
    try:
        adapter = read(tensors)
        inweave.check(adapter, index).as_dict()
        assert len(repr(adapter)) < 300
        for dialect in WRITTEN:
            written = rewrite(adapter, dialect, index)
            if written.tensors:
                read(written.tensors, written.metadata, written.config)
    except InweaveError:
        pass


@pytest.mark.parametrize("roles", SETS, ids="+".join)
def test_any_shapes_of_factors_give_our_errors(roles: tuple[str, ...]) -> None:
    index = index_from_names({"x.weight": (3, 3), "x.bias": (3,), "y.weight": (3, 2, 3, 3)}, source="x")
    chance = pseudo.Random(str(roles))
    combinations = list(itertools.product(SHAPES, repeat=min(len(roles), 3)))
    for shapes in chance.sample(combinations, sized(60, 1000)):
        shapes += tuple(chance.choice(SHAPES) for _ in roles[3:])
        module = chance.choice(("base_model.model.x", "lora_unet_x", "y"))
        integers = ("bias_indices", "bias_size", "reshape_weight")
        tensors = {
            f"{module}.{role}": zeros(shape, "I64") if role in integers else random(1, *shape)
            for role, shape in zip(roles, shapes, strict=True)
        }
        survives(tensors, index)


def test_a_scalar_up_with_a_vector_of_magnitudes(tmp_path: Path) -> None:
    for up, down, magnitude in itertools.product(SHAPES[:4], SHAPES, SHAPES):
        tensors = {"lora_unet_x.lora_up.weight": zeros(up), "lora_unet_x.lora_down.weight": zeros(down),
                   "lora_unet_x.dora_scale": zeros(magnitude)}  # fmt: skip
        adapter = read(tensors)
        assert not adapter.entries and adapter.problems


def test_factors_that_make_no_product_are_malformed_when_read() -> None:
    cases: dict[str, dict[str, tuple[int, ...]]] = {
        "lora_up may have": {"lora_up.weight": (3, 2, 2), "lora_down.weight": (2, 3)},
        "Tucker core": {"lora_up.weight": (3, 2), "lora_down.weight": (2, 3), "lora_mid.weight": (3, 2, 3, 3)},
        "do not make": {"hada_w1_a": (3, 2), "hada_w1_b": (1, 3), "hada_w2_a": (3, 2), "hada_w2_b": (2, 3)},
        "differ": {"hada_w1_a": (3, 2), "hada_w1_b": (2, 3), "hada_w2_a": (1, 2), "hada_w2_b": (2, 3)},
        "LoKr": {"lokr_w1": (1, 1), "lokr_w2_a": (3, 2), "lokr_w2_b": (1, 3)},
        "triangles": {"oft_R.weight": (2, 2)},
    }
    for reason, shapes in cases.items():
        adapter = read({f"unet.x.{role}": zeros(shape) for role, shape in shapes.items()})
        assert [problem.fault for problem in adapter.problems] == ["malformed"]
        assert reason in adapter.problems[0].reason


def test_what_is_printed_is_short(tmp_path: Path) -> None:
    names = [f"lora_unet_down_blocks_{i}_attentions_0_transformer_blocks_0_attn1_to_q" for i in range(500)]
    tensors = {
        f"{name}.{role}": zeros(shape)
        for name in names
        for role, shape in {"lora_down.weight": (1, 320), "lora_up.weight": (320, 1), "alpha": ()}.items()
    }
    path = write_file(tmp_path / "a.safetensors", tensors)
    adapter = inweave.load(path)
    plan = inweave.resolve(adapter, "sd1.5", strict=False)
    results = [adapter, plan, plan.report, inweave.inspect(path), inweave.check(adapter, "sd1.5"),
               inweave.convert(path, tmp_path / "o.safetensors", to="comfy", base="sd1.5", drop=True)]  # fmt: skip
    assert max(len(text) for result in results for text in (repr(result), str(result))) < 1000


def test_integers_of_thousands_of_digits(tmp_path: Path) -> None:
    for text in ("1" * 5000, "1" * 4000, "-" + "1" * 4000):
        raw = f'{{"a":{{"dtype":"F32","shape":[{text}],"data_offsets":[0,4]}}}}'.encode()
        with pytest.raises(FormatError):
            parse_header(raw, 8 + len(raw) + 4)
        folder = tmp_path / "peft"
        folder.mkdir(exist_ok=True)
        write_file(
            folder / "adapter_model.safetensors",
            {"base_model.model.x.lora_A.weight": random(1, 2, 3), "base_model.model.x.lora_B.weight": random(1, 3, 2)},
        )
        for name in ("r", "lora_alpha"):
            (folder / "adapter_config.json").write_text(f'{{"peft_type":"LORA","r":2,"lora_alpha":2,"{name}":{text}}}')
            with pytest.raises(FormatError):
                inweave.load(folder)


def test_numbers_of_every_kind_are_read_as_scalars() -> None:
    for value in (0.0, 1.0, float("nan"), float("inf"), -3.0):
        for kind in ("F16", "F32", "F64"):
            number = Tensor(kind, (), np.asarray(value, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[kind]).tobytes())
            tensors = {"lora_unet_x.lora_down.weight": random(1, 2, 3), "lora_unet_x.lora_up.weight": random(2, 3, 2)}
            for role in ("alpha", "scale", "on_input", "oft_R.scaled_oft", "reshape_weight"):
                read(tensors | {f"lora_unet_x.{role}": number})


@pytest.mark.parametrize(
    ("size", "kind", "reason"),
    [
        ((20_000, 20_000), "I64", "bias_size is [20000, 20000], and the factors change [3, 3]"),
        ((3_000_000_000, 3_000_000_000), "I64", "bias_size is [3000000000, 3000000000]"),
        ((-3, -3), "I64", "bias_size is [-3, -3]"),
        ((3,), "I64", "two whole numbers"),
        ((3, 3), "F32", "two whole numbers"),
    ],
)
def test_the_size_of_sparse_values_is_that_of_the_change(size: tuple[int, ...], kind: str, reason: str) -> None:
    stated = Tensor(kind, (len(size),), np.array(size, {"I64": np.int64, "F32": np.float32}[kind]).tobytes())
    tensors = {"lora_up.weight": zeros((3, 1)), "lora_down.weight": zeros((1, 3)), "bias_indices": zeros((2, 1), "I64"),
               "bias_values": zeros((1,)), "bias_size": stated}  # fmt: skip
    adapter = read({f"lora_unet_x.{role}": tensor for role, tensor in tensors.items()})
    assert not adapter.entries and reason in adapter.problems[0].reason
    exact = Tensor("I64", (2,), np.array((3, 3), np.int64).tobytes())
    adapter = read({f"lora_unet_x.{role}": tensor for role, tensor in (tensors | {"bias_size": exact}).items()})
    assert len(adapter.entries) == 1 and not adapter.problems


def test_a_file_of_two_vectors_does_not_widen_a_layer_without_limit() -> None:
    index = index_from_names({"x.weight": (3, 3)}, source="x")
    for columns, fits in ((48, True), (49, False), (1_000_000, False)):
        stated = Tensor("I64", (2,), np.array((3, columns), np.int64).tobytes())
        tensors = {"x.lora_B.weight": zeros((3, 1)), "x.lora_A.weight": zeros((1, columns)), "x.reshape_weight": stated}
        assert inweave.check(read(tensors), index).ok is fits, columns
