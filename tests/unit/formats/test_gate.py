"""The header gate: each rule has a header that breaks it, and the real safetensors library agrees on the rest."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from inweave.adapter import Tensor
from inweave.adapter.tensor import BITS
from inweave.errors import FormatError
from inweave.formats.files import open_container, read_header, write_file
from inweave.formats.gate import MAX_HEADER, MAX_NAME, MAX_TENSORS, Header, TensorSpan, header_length, parse_header
from tests.bad_files import pack
from tests.support import sized


def entry(shape: object = (2,), offsets: object = (0, 2), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(header: object, data: int = 2) -> Header:
    raw = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    return parse_header(raw, 8 + len(raw) + data)


def refused(header: object, *fragments: str, data: int = 2) -> None:
    with pytest.raises(FormatError) as caught:
        parse(header, data)
    for part in fragments:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1000  # a message stays short however long the header is
    assert str(caught.value).isprintable()


def test_a_good_header_is_read() -> None:
    header = parse({"__metadata__": {"a": "b"}, "x": entry(), "y": entry([1, 2], [2, 6], "F16")}, data=6)
    assert header.metadata == {"a": "b"}
    assert header.spans == {"x": TensorSpan("U8", (2,), 0, 2), "y": TensorSpan("F16", (1, 2), 2, 6)}
    assert header.data_start == 8 + len(
        json.dumps({"__metadata__": {"a": "b"}, "x": entry(), "y": entry([1, 2], [2, 6], "F16")})
    )


def test_nothing_but_a_header() -> None:
    assert parse(b"{}", data=0) == Header({}, {}, 10)
    assert parse({"__metadata__": None}, data=0).metadata == {}


def test_tensors_may_come_in_any_order_and_be_empty() -> None:
    header = parse(
        {"b": entry([1], [1, 2]), "e": entry([0, 3], [1, 1]), "a": entry([], [0, 1]), "z": entry([0], [2, 2])}
    )
    assert [header.spans[name].begin for name in "aebz"] == [0, 1, 1, 2]


# -- the length field


@pytest.mark.parametrize("size", range(8))
def test_too_short_for_a_length(size: int) -> None:
    with pytest.raises(FormatError, match=f"the file has {size} bytes"):
        header_length(bytes(size), size)


def test_header_over_the_limit() -> None:
    assert header_length(struct.pack("<Q", MAX_HEADER), 1 << 40) == MAX_HEADER
    for length in (MAX_HEADER + 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        with pytest.raises(FormatError, match=f"claims {length:,} bytes; at most 16,777,216"):
            header_length(struct.pack("<Q", length), 1 << 40)


@pytest.mark.parametrize(("length", "size"), [(0, 8), (1, 100), (3, 10), (100, 107), (2, 9), (2, 0)])
def test_header_longer_than_the_file(length: int, size: int) -> None:
    with pytest.raises(FormatError, match="cut short or not a safetensors file"):
        header_length(struct.pack("<Q", length), size)


def test_the_largest_header_is_read() -> None:
    raw = json.dumps({"x": entry()}).encode()
    raw += b" " * (MAX_HEADER - len(raw))
    assert list(parse_header(raw, 8 + len(raw) + 2).spans) == ["x"]


@pytest.mark.parametrize("filler", [b"[", b"[],", b'{"a":', b"9", b'"\\u0041', b"0,", b" ", b"\xc3\xa9"])
def test_the_worst_large_headers_end_soon(filler: bytes) -> None:
    """A megabyte of any filler raises, in time linear in the size of the header (here: well under a second)."""
    raw = b'{"x":' + filler * (1_000_000 // len(filler))
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(FormatError):
            parse_header(raw, 8 + len(raw))
        best = min(best, time.perf_counter() - start)
    assert best < 1


# -- the document


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"x": }', "not valid JSON"),
        (b"{}{}", "not valid JSON"),
        (b"{} \0", "not valid JSON"),
        (b"{'x': 1}", "not valid JSON"),
        (b'{"x": 01}', "not valid JSON"),
        (b'{"x\n": 1}', "not valid JSON"),
        (b'\xef\xbb\xbf{"x": 1}', "not valid JSON"),
        (b'{"\xff": 1}', "not valid JSON"),
        (b'{"\xed\xa0\x80": 1}', "not valid JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b"[]", "a JSON list"),
        (b"null", "a JSON NoneType"),
        (b"3", "a JSON int"),
        (b'"{}"', "a JSON str"),
    ],
)
def test_not_a_json_object(raw: bytes, message: str) -> None:
    refused(raw, message, data=0)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_json_does_not_have(constant: str) -> None:
    refused(f'{{"x": {{"dtype": "U8", "shape": [{constant}], "data_offsets": [0, 2]}}}}'.encode(), constant)


@pytest.mark.parametrize("depth", [500, 900, 990, 1000, 1010, 5000, 100_000])
@pytest.mark.parametrize(("open_", "close"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting(depth: int, open_: bytes, close: bytes) -> None:
    inner = open_ * depth + b"1" + close * depth
    for raw in (
        inner,
        b'{"x": ' + inner + b"}",
        b'{"x": {"dtype": ' + inner + b', "shape": [], "data_offsets": [0, 1]}}',
        b'{"x": {"dtype": "U8", "shape": ' + inner + b', "data_offsets": [0, 1]}}',
        b'{"__metadata__": {"a": ' + inner + b"}}",
    ):
        with pytest.raises(FormatError):
            parse_header(raw, 8 + len(raw))


def test_too_deep_nesting_is_reported() -> None:
    refused(b"[" * 100_000, "nested too deeply", data=0)


def test_too_many_tensors() -> None:
    """Counted before any of them is looked at: at the limit it is the first entry that is wrong."""

    def header_of(count: int) -> bytes:
        return ("{" + ",".join(f'"{i}":0' for i in range(count)) + "}").encode()

    refused(header_of(MAX_TENSORS), "tensor '0' needs exactly")
    refused(header_of(MAX_TENSORS + 1), "lists 100,001 tensors", "at most 100,000")


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"x": 1, "x": 1}', "x"),
        (b'{"x": 1, "y": 1, "\\u0078": 1}', "x"),
        (b'{"__metadata__": {}, "__metadata__": {}}', "__metadata__"),
        (b'{"__metadata__": {"k": "1", "k": "1"}}', "k"),
        (b'{"x": {"dtype": "U8", "dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', "dtype"),
    ],
)
def test_a_name_twice(raw: bytes, name: str) -> None:
    refused(raw, f"names {name!r} twice")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([], "__metadata__ is not an object of strings"),
        ("text", "__metadata__ is not an object of strings"),
        (0, "__metadata__ is not an object of strings"),
        ({"k": 1}, "metadata 'k' is a int"),
        ({"k": None}, "metadata 'k' is a NoneType"),
        ({"good": "text", "k": ["text"]}, "metadata 'k' is a list"),
        ({"k": {"a": "b"}}, "metadata 'k' is a dict"),
        ({"k": True}, "metadata 'k' is a bool"),
    ],
)
def test_metadata_of_strings_only(metadata: object, message: str) -> None:
    refused({"__metadata__": metadata, "x": entry()}, message)


@pytest.mark.parametrize("raw", [rb'{"__metadata__": {"k": "\ud800"}}', rb'{"__metadata__": {"k\udfff": ""}}'])
def test_half_a_surrogate_pair_in_the_metadata(raw: bytes) -> None:
    """Real safetensors refuses it too; accepted, it could be neither printed nor written again."""
    refused(raw, "surrogate", data=0)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(pack(raw))


def test_whole_surrogate_pairs_and_any_other_text_in_the_metadata() -> None:
    assert parse(rb'{"__metadata__": {"k": "\ud83d\ude00", "\u0000": "\u202e"}}', data=0).metadata == {
        "k": "\N{GRINNING FACE}",
        "\0": "\u202e",
    }


# -- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "has 0 characters"),
        ("x" * (MAX_NAME + 1), "has 513 characters"),
        ("x" * 100_000, "has 100000 characters"),
        ("a\0b", r"'a\x00b'"),
        ("a\nb", r"'a\nb'"),
        ("a\x1b[31mb", r"'a\x1b[31mb'"),
        ("a\x7fb", r"'a\x7fb'"),
        ("a\x85b", r"'a\x85b'"),
        ("a\u202eb", r"'a\u202eb'"),
        ("a\u2066b", r"'a\u2066b'"),
        ("a\u200bb", r"'a\u200bb'"),
        ("a\ufeffb", r"'a\ufeffb'"),
        ("a\u00a0b", r"'a\xa0b'"),
        ("__class__", "'__class__'"),
        ("a.__class__.b", "'a.__class__.b'"),
        ("a.__init__", "'a.__init__'"),
        ("__globals__.lora_up.weight", "'__globals__.lora_up.weight'"),
        ("a.__x.weight", "'a.__x.weight'"),
        ("a.____reduce____.b", "'a.____reduce____.b'"),
        ("a.___x.b", "'a.___x.b'"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    refused({name: entry()}, message)


def test_a_lone_surrogate_in_a_name() -> None:
    refused(rb'{"a\ud800": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', r"'a\ud800'")


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "x" * MAX_NAME,
        "x.___.layer.W_down",
        "x.___.alpha",
        "_",
        "__",
        "lora_unet__x",
        "lora_unet_a__b.lora_up.weight",
        "a._orig_mod.b",
        "_aux.x",
        "a.x__.b",
        "unet:0:up",
        "a b/c-d*[0]",
        "é.層.weight",
        "\N{GRINNING FACE}",
    ],
)
def test_names_that_pass(name: str) -> None:
    assert list(parse({name: entry()}).spans) == [name]


# -- one tensor's entry


@pytest.mark.parametrize(
    "entry",
    [
        None,
        1,
        "U8",
        [],
        {},
        {"dtype": "U8", "shape": [2]},
        {"dtype": "U8", "data_offsets": [0, 2]},
        {"shape": [2], "data_offsets": [0, 2]},
        {**entry(), "extra": 1},
        {"Dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    ],
)
def test_fields_of_an_entry(entry: object) -> None:
    refused({"the.name": entry}, "'the.name'", "needs exactly dtype, shape and data_offsets")


@pytest.mark.parametrize("dtype", ["", "u8", "F31", "float32", "F4", "Q4_0", None, 8, ["U8"], {"U8": 1}, True])
def test_unknown_dtype(dtype: object) -> None:
    refused({"the.name": entry(dtype=dtype)}, "'the.name'", "has dtype", "known are BOOL, U8")


_SIZES = [-1, 2.0, 0.5, True, False, None, "2", [2], 1 << 62, 1 << 63, 1 << 64, 10**30, -(10**30)]


@pytest.mark.parametrize("size", _SIZES, ids=repr)
def test_sizes_that_are_no_sizes(size: object) -> None:
    refused({"the.name": entry(shape=[size])}, "'the.name'", "has shape")
    refused({"the.name": entry(shape=[2, size])}, "'the.name'", "has shape")
    refused({"the.name": entry(offsets=[size, 2])}, "'the.name'", "has data_offsets")
    refused({"the.name": entry(offsets=[0, size])}, "'the.name'", "has data_offsets")


@pytest.mark.parametrize("shape", [None, 2, "2", {}, {"0": 2}, [1] * 9, [0] * 100_000])
def test_shapes_that_are_no_shapes(shape: object) -> None:
    refused({"the.name": entry(shape=shape)}, "'the.name'", "has shape", "at most 8 sizes")


def test_eight_axes_are_the_most() -> None:
    assert parse({"x": entry([1] * 7 + [2])}).spans["x"].shape == (1, 1, 1, 1, 1, 1, 1, 2)


@pytest.mark.parametrize("offsets", [None, 2, "02", {}, [], [0], [0, 2, 2], [[0, 2]]])
def test_offsets_that_are_no_offsets(offsets: object) -> None:
    refused({"the.name": entry(offsets=offsets)}, "'the.name'", "has data_offsets", "two positions")


@pytest.mark.parametrize(
    ("shape", "offsets", "dtype", "takes"),
    [
        ([2], [0, 1], "U8", 2),
        ([2], [0, 2], "F16", 4),
        ([], [0, 2], "F32", 4),
        ([0], [0, 2], "U8", 0),
        ([2], [2, 0], "U8", 2),
        ([2, 3], [0, 2], "F64", 48),
    ],
)
def test_span_of_another_length(shape: list[int], offsets: list[int], dtype: str, takes: int) -> None:
    refused({"the.name": entry(shape, offsets, dtype)}, "'the.name'", f"takes {takes} bytes")


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 61, 8],  # 2**64: wraps to 0 in 64 bits
        [1 << 32, 1 << 32],
        [(1 << 62) - 1] * 8,
        [1 << 61, 1 << 61, 0],  # no numbers at all, and still no shape an array can have
    ],
)
def test_products_that_overflow(shape: list[int]) -> None:
    """A product that wraps around in 64 bits is refused."""
    wrapped = math.prod(shape) % (1 << 64)
    refused({"the.name": entry(shape, [0, wrapped])}, "'the.name'", "shape", data=wrapped)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(pack({"the.name": entry(shape, [0, wrapped])}))


def test_an_overflow_behind_a_zero() -> None:
    refused({"the.name": entry([0, 1 << 61, 2], [0, 0])}, "'the.name'", "shape", data=0)
    assert parse({"x": entry([0, 1 << 61], [0, 0])}, data=0).spans["x"].shape == (0, 1 << 61)


# -- where tensors lie


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], [0, 2]), "b": entry([2], [1, 3])}, 3, "'b' starts at byte 1, not 2: it overlaps"),
        ({"a": entry([2], [0, 2]), "b": entry([2], [0, 2])}, 2, "overlaps"),
        ({"a": entry([4], [0, 4]), "b": entry([0], [2, 2])}, 4, "'b' starts at byte 2, not 4: it overlaps"),
        ({"a": entry([2], [0, 2]), "b": entry([2], [3, 5])}, 5, "'b' starts at byte 3, not 2: it leaves a gap"),
        ({"a": entry([2], [1, 3])}, 3, "'a' starts at byte 1, not 0: it leaves a gap"),
        ({"a": entry([0], [1, 1])}, 1, "'a' starts at byte 1, not 0: it leaves a gap"),
        ({"a": entry([2], [0, 2])}, 3, "1 bytes follow the last tensor"),
        ({}, 1, "1 bytes follow the last tensor"),
        ({"a": entry([2], [0, 2])}, 1, "need 2 bytes but the file holds 1"),
        ({"a": entry([1 << 61], [0, 1 << 61])}, 2, "the file holds 2: it is cut short"),
        ({"a": entry([2], [1 << 61, (1 << 61) + 2])}, 2, "leaves a gap"),
    ],
)
def test_tiling(header: object, data: int, message: str) -> None:
    refused(header, message, data=data)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(pack(header, bytes(data)))


# -- the real library

names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20).filter(
    lambda name: not any(part.startswith("__") for part in name.split("."))
)
metadata = st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    size = math.prod(shape) * BITS[dtype] // 8
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@given(st.dictionaries(names, tensors(), max_size=6), metadata)
@settings(max_examples=sized(50, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_reads_what_inweave_writes(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    path = write_file(tmp_path / "x.safetensors", tensors, metadata)
    blob = path.read_bytes()
    assert int.from_bytes(blob[:8], "little") % 8 == 0  # the data is aligned
    read = {
        name: Tensor(row["dtype"], tuple(row["shape"]), bytes(row["data"]))
        for name, row in safetensors.deserialize(blob)
    }
    assert read == tensors
    with safetensors.safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == sorted(tensors)
        assert (file.metadata() or {}) == metadata
    again = open_container(path)
    assert again.metadata == metadata
    assert {name: Tensor(t.dtype, t.shape, bytes(t.data)) for name, t in again.tensors.items()} == tensors


def test_every_tensor_inweave_writes_is_aligned(tmp_path: Path) -> None:
    tensors = {f"t{i}": Tensor(dtype, (3,), bytes(3 * bits // 8)) for i, (dtype, bits) in enumerate(BITS.items())}
    header = read_header(write_file(tmp_path / "x.safetensors", tensors))
    for span in header.spans.values():
        assert (header.data_start + span.begin) % (BITS[span.dtype] // 8) == 0


_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8",
          "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?", "C64": "c8"}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {"a": "b", "ü": "\N{GRINNING FACE}"}])
def test_inweave_reads_what_safetensors_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    rng = np.random.default_rng(7)
    arrays: Mapping[str, np.ndarray] = {
        f"{dtype}.{'x'.join(map(str, shape))}": rng.integers(0, 2, shape).astype(code)
        for dtype, code in _NUMPY.items()
        for shape in ((), (1,), (0,), (3, 5), (2, 0, 3), (1, 2, 3, 4))
    }
    save_file(dict(arrays), tmp_path / "file.safetensors", metadata)
    (tmp_path / "bytes.safetensors").write_bytes(save(dict(arrays), metadata))
    for name in ("file.safetensors", "bytes.safetensors"):
        container = open_container(tmp_path / name)
        assert container.metadata == (metadata or {})
        assert sorted(container.tensors) == sorted(arrays)
        for key, tensor in container.tensors.items():
            assert tensor.dtype == key.partition(".")[0]
            assert tensor.shape == arrays[key].shape
            assert bytes(tensor.data) == arrays[key].tobytes()


def test_what_is_written_passes_the_same_gate(tmp_path: Path) -> None:
    short = Tensor("F32", (2,), bytes(4))
    good = Tensor("F32", (1,), bytes(4))
    target = tmp_path / "x.safetensors"
    for tensors, metadata in (
        ({"a": short}, None),
        ({"a.__class__": good}, None),
        ({"": good}, None),
        ({"__metadata__": good}, None),
        ({"a\ud800": good}, None),
        ({"a\n": good}, None),
        ({"a": good}, {"k": 1}),
        ({"a": good}, {"k": "\ud800"}),
        ({"a": good}, {"k": "x" * MAX_HEADER}),
    ):
        with pytest.raises(FormatError):
            write_file(target, tensors, metadata)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
