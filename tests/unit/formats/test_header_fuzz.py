"""Fuzzing of headers: 200,000 damaged ones (a tenth by default), each read or refused quickly with a `FormatError`.

A refusal leaves nothing behind, and headers that the gate accepts are read in the same way by the safetensors library.
A smaller run takes damaged files, and well-formed files full of nonsense, all the way through `inweave.load`.
"""

from __future__ import annotations

import gc
import json
import math
import random
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

import inweave
from inweave.adapter.tensor import BITS
from inweave.errors import FormatError, InweaveError
from inweave.formats.dialects import dialects
from inweave.formats.gate import Header, header_length, parse_header
from inweave.formats.grammar import SUFFIXES
from tests.bad_files import pack
from tests.support import sized

SHARDS = sized(3, 8)
PER_SHARD = sized(2_500, 25_000)
DAMAGED_FILES = sized(500, 2_500)
SLOWEST = 0.050  # seconds a header
#: blocks of Python's allocator a shard may end with beyond those it began with: caches of `re`, interned names
BLOCKS = 5_000
#: bytes the process's peak may rise by: the largest damaged header is a few kilobytes, so this is all noise
PEAK = 32 * 1024 * 1024


def _lay_out(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8), position


SEEDS: tuple[tuple[bytes, int], ...] = (
    _lay_out({"lora_unet_x.lora_down.weight": ("F16", [4, 8]), "lora_unet_x.lora_up.weight": ("F16", [8, 4])}),
    _lay_out(
        {"x.alpha": ("F32", []), "x.lora_A.weight": ("BF16", [2, 3])}, {"ss_network_dim": "4", "é": "\N{SNOWMAN}"}
    ),
    _lay_out({"none": ("F32", [0]), "a.b": ("U8", [1]), "none2": ("I64", [2, 0, 3]), "none3": ("F64", [0, 0])}),
    _lay_out({"down": ("F8_E4M3", [3, 5]), "up": ("F8_E5M2", [5, 3]), "c": ("C64", [2]), "s": ("F8_E8M0", [])}),
    _lay_out({}, {}),
    _lay_out({f"layers.{i}.___.layer.W_down": ("I8", [i]) for i in range(6)}, {"k": ""}),
)

_NUMBERS = [
    b"0", b"-1", b"-0", b"1", b"2", b"1.0", b"1e3", b"1E400", b"2147483648", b"4294967296", b"4611686018427387903",
    b"4611686018427387904", b"9223372036854775808", b"18446744073709551616", b"9" * 60, b"7" * 5000, b"true", b"null",
    b'"1"', b"[]", b"NaN", b"-Infinity", b"0x10", b"01", b"-",
]  # fmt: skip
_TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\u0000", b"\\ud800", b"\\ud83d\\ude00", b"\0", b"\n",
    b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xae", b"null", b"true", b"[" * 1500, b'{"a":' * 1500, b"]" * 40, b'"F32"',
    b'"F8_E4M3FNUZ"', b'"BOOL"', b'"U8"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__":{},',
    b'"__metadata__":{"a":1},', b'"__metadata__":[],', b'"__class__":', b".__init__.", b",[0]", b",0",
    b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b"x" * 600, b" " * 300, b"/*", b"//",
]  # fmt: skip
_NUMBER = re.compile(rb"\d+")
_STRING = re.compile(rb'"[^"]*"')


def _flip(raw: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        if raw:
            raw[rng.randrange(len(raw))] = rng.randrange(256)


def _truncate(raw: bytearray, rng: random.Random) -> None:
    del raw[rng.randint(0, len(raw)) :]


def _insert(raw: bytearray, rng: random.Random) -> None:
    at = rng.randint(0, len(raw))
    raw[at:at] = rng.randbytes(rng.randint(1, 8))


def _cut(raw: bytearray, rng: random.Random) -> None:
    at = rng.randint(0, len(raw))
    del raw[at : at + rng.randint(1, 20)]


def _repeat(raw: bytearray, rng: random.Random) -> None:
    at, to = rng.randint(0, len(raw)), rng.randint(0, len(raw))
    raw[to:to] = raw[at : at + rng.randint(1, 80)] * rng.choice((1, 1, 1, 2, 20))


def _splice(raw: bytearray, rng: random.Random) -> None:
    at = rng.randint(0, len(raw))
    raw[at : at + rng.choice((0, 0, 1, 4))] = rng.choice(_TOKENS)


def _swap(pattern: re.Pattern[bytes], others: list[bytes]) -> Callable[[bytearray, random.Random], None]:
    def mutate(raw: bytearray, rng: random.Random) -> None:
        matches = list(pattern.finditer(raw))
        if matches:
            here, there = rng.choice(matches), rng.choice(matches)
            raw[here.start() : here.end()] = rng.choice(others) if rng.random() < 0.5 else there[0]

    return mutate


_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1, 2.0, 1 << 61, 1 << 62, "", "U8", "F64", [], [0], [2, 2], [0, 4], [4, 0], [1] * 9, {},
    {"a": 1}, {"a": "b"},
)  # fmt: skip


def _edit(raw: bytearray, rng: random.Random) -> None:
    """Still JSON, with one value replaced or one tensor moved."""
    try:
        document = json.loads(bytes(raw))
        if not isinstance(document, dict) or not document:
            return
        name = rng.choice(list(document))
        entry = document[name]
        if not isinstance(entry, dict) or not entry or rng.random() < 0.3:
            document[rng.choice((name, "__metadata__", "new"))] = rng.choice(_VALUES)
        elif "data_offsets" in entry and rng.random() < 0.3:
            by = rng.choice((-8, -1, 1, 8))
            entry["data_offsets"] = [at + by for at in entry["data_offsets"]]
        else:
            entry[rng.choice(list(entry))] = rng.choice(_VALUES)
        raw[:] = json.dumps(document).encode()
    except (ValueError, TypeError, RecursionError):
        return  # an earlier mutation left nothing to edit


_MUTATE = (_flip, _truncate, _insert, _cut, _repeat, _splice, _edit, _edit,
           _swap(_NUMBER, _NUMBERS), _swap(_NUMBER, _NUMBERS), _swap(_NUMBER, _NUMBERS),
           _swap(_STRING, [t for t in _TOKENS if t[:1] == b'"']))  # fmt: skip


def _damaged(rng: random.Random) -> bytes:
    """A whole file: the length, which mostly fits, a damaged header, and as much data as before."""
    header, data = rng.choice(SEEDS)
    raw = bytearray(header)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_MUTATE)(raw, rng)
    length = bytearray(struct.pack("<Q", len(raw)))
    if rng.random() < 0.15:
        if rng.random() < 0.5:
            length[rng.randrange(8)] = rng.randrange(256)
        else:
            length[:] = struct.pack("<Q", max(0, len(raw) + rng.choice((-8, -2, -1, 1, 2, data, data + 1))))
    size = data if rng.random() < 0.95 else max(0, data + rng.choice((-1, 1, 8)))
    return bytes(length) + bytes(raw) + bytes(size)


def _read(file: bytes) -> Header | None:
    """Return the header that the gate parses, or None if it refuses the file; other errors propagate."""
    try:
        length = header_length(file[:64], len(file))
        return parse_header(file[8 : 8 + length], len(file))
    except FormatError as error:
        assert str(error)
        return None


def _timed(file: bytes) -> tuple[Header | None, float]:
    start = time.perf_counter()
    header = _read(file)
    return header, time.perf_counter() - start


def _peak() -> int:
    resource = pytest.importorskip("resource")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _agrees(header: Header, file: bytes) -> bool:
    """Return whether safetensors reads the same; it parses a size of -0 as a float, JSON and the gate as 0."""
    if b"-0" in file:
        return True
    theirs = {name: (row["dtype"], tuple(row["shape"])) for name, row in safetensors.deserialize(file)}
    return theirs == {name: (span.dtype, span.shape) for name, span in header.spans.items()}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damaged_headers(shard: int) -> None:
    rng = random.Random(f"headers {shard}")
    for _ in range(500):  # fill the caches before anything is measured
        _read(_damaged(rng))
    gc.collect()
    blocks, peak = sys.getallocatedblocks(), _peak()
    accepted = refused = 0
    for number in range(PER_SHARD):
        file = _damaged(rng)
        header, seconds = _timed(file)
        if seconds > SLOWEST:  # a busy machine stops for a while now and then, a slow header is always slow
            seconds = min(_timed(file)[1] for _ in range(5))
            assert seconds <= SLOWEST, f"header {number} of shard {shard} takes {seconds:.3f} s: {file[:200]!r}"
        if header is None:
            refused += 1
            continue
        accepted += 1
        assert _agrees(header, file), f"header {number} of shard {shard} reads otherwise with safetensors: {file!r}"
    del header, file
    gc.collect()
    assert sys.getallocatedblocks() - blocks < BLOCKS
    assert _peak() - peak < PEAK
    # the damage is neither too heavy nor too light: both ends of the gate are reached
    assert accepted > PER_SHARD // 50
    assert refused > PER_SHARD // 2


@pytest.mark.parametrize(("raw", "size"), SEEDS)
def test_the_seeds_are_good(raw: bytes, size: int) -> None:
    file = pack(raw, bytes(size))
    header = _read(file)
    assert header is not None
    assert _agrees(header, file)


def test_damage_reaches_every_rule() -> None:
    """The fuzzer is worth its time: the messages it provokes cover the whole gate."""
    rng = random.Random("rules")
    reached: set[str] = set()
    rules = {"not valid JSON", "nested too deeply", "twice", "which is not JSON", "not an object of strings",
             "only strings are allowed", "needs exactly", "has dtype", "has shape", "has data_offsets", "takes",
             "characters; 1 to", "control or unprintable", "two underscores", "overlaps", "leaves a gap", "cut short",
             "follow the last tensor", "at most 16,777,216", "a JSON "}  # fmt: skip
    if sys.version_info >= (3, 12):
        rules.discard("nested too deeply")  # its JSON reader goes deeper than the fuzzer does
    for _ in range(30_000):
        file = _damaged(rng)
        try:
            parse_header(file[8 : 8 + header_length(file[:64], len(file))], len(file))
        except FormatError as error:
            reached |= {rule for rule in rules - reached if rule in str(error)}
        if reached == rules:
            break
    assert rules - reached == set()


# -- whole files, through everything that reads them


def _load(path: Path, file: bytes) -> bool:
    path.write_bytes(file)
    try:
        adapter = inweave.load(path)
    except InweaveError as error:
        assert str(path) in str(error)
        return False
    used = {key for entry in adapter.entries for key in entry.keys}
    used |= {key for problem in adapter.problems for key in problem.keys} | set(adapter.carried)
    assert used == set(adapter.tensors)  # nothing is silent
    for entry in adapter.entries:
        assert isinstance(entry.factors.scale, float)  # what every later step asks an entry first
        assert isinstance(entry.factors.rank, int | None)
        assert isinstance(entry.factors.shape(), tuple)
    return True


def _real_files() -> list[bytes]:
    pair = {"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": ("F16", [2, 4, 1, 1]),
            "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": ("F16", [4, 2, 1, 1]),
            "lora_unet_down_blocks_0_attentions_0_proj_in.alpha": ("F16", [])}  # fmt: skip
    peft = {"unet.a.b.lora_A.weight": ("F32", [2, 3]), "unet.a.b.lora_B.weight": ("F32", [3, 2]),
            "unet.a.b.lora_magnitude_vector": ("F32", [3])}  # fmt: skip
    lycoris = {f"lora_unet_m.{s}": ("BF16", [2, 2]) for s in ("lokr_w1", "lokr_w2_a", "lokr_w2_b")}
    lycoris |= {f"lora_unet_n.{s}": ("F8_E4M3", [2, 2]) for s in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
    metadata = {
        "lora_adapter_metadata": json.dumps({"unet.lora_alpha": 4, "unet.r": 2, "unet.alpha_pattern": {"b": 2}})
    }
    files = (
        _lay_out(pair, {"ss_network_dim": "2"}),
        _lay_out(peft, metadata),
        _lay_out(lycoris, {"ss_network_args": "{}"}),
    )
    return [pack(raw, bytes(range(256))[:size] + bytes(max(0, size - 256))) for raw, size in files]


def test_damaged_files_through_load(tmp_path: Path) -> None:
    rng = random.Random("files")
    files = _real_files()
    assert all(_load(tmp_path / "x.safetensors", file) for file in files)
    loaded = 0
    for _ in range(DAMAGED_FILES):
        file = bytearray(rng.choice(files))
        end = 8 + int.from_bytes(file[:8], "little")
        header = file[8:end]
        for _ in range(rng.choice((1, 1, 2))):
            rng.choice(_MUTATE)(header, rng)
        length = len(header) if rng.random() < 0.9 else len(header) + rng.choice((-1, 1, 5))
        loaded += _load(tmp_path / "x.safetensors", struct.pack("<Q", length) + header + file[end:])
    assert DAMAGED_FILES // 50 < loaded < DAMAGED_FILES * 4 // 5


_MODULES = (
    "x", "mid_block_attentions_0_proj_in", "down_blocks.0.attentions.0.proj_in", "double_blocks.0.img_attn.qkv",
    "single_blocks_0_linear1", "lora_qkv", "traced_lora_llama", "text_model_encoder_layers_0_mlp_fc1", "²", "#1",
)  # fmt: skip
_WHOLE_KEYS = (
    "unet:0:up", "unet:0:down", "unet:99999:up", "text_encoder:3:down", "w_a_000", "a0.weight", "b0.weight",
    "m0.weight", "x.magnitude0.weight", "x.oft_blocks.0", "x.oft_blocks.7", "x.oft_blocks.²",
    "x.processor.to_q_lora.down.weight", "x.processor.to_q_lora.up.weight", "x.processor.qkv_lora1.up.weight",
    "m.vera_A", "m.vera_B", "emb_params", "bundle_emb.a", "x.lora_A.default.weight", "x.lora_B.other.weight",
)  # fmt: skip
_METADATA = {
    "lora_adapter_metadata": (
        "[]", "5", "{", "[" * 5000, '{"unet.lora_alpha": "x"}', '{"unet.lora_alpha": 1, "unet.alpha_pattern": 5}',
        '{"unet.lora_alpha": 1, "unet.alpha_pattern": {"(": 2}}', '{"unet.lora_alpha": 1e999}',
        '{"unet.lora_alpha": NaN}', '{"unet.lora_alpha": 1, "unet.rank_pattern": {"x": 1e999}}',
        '{"unet.lora_alpha": 1, "unet.alpha_pattern": {"x{99999999999}": 2}}',
        '{"unet.lora_alpha": 1, "unet.target_parameters": 3}', '{"unet.lora_alpha": 2, "unet.r": 2}',
    ),
    "ss_network_args": ('{"split_qkv": "true"}', '{"rs_lora": true}', "x", "[]", "[" * 5000),
    "ss_network_dim": ("4", "0", "-1", "x", "²", "9" * 5000, ""),
    "unet": ("[]", "{}", "5", "x", "[" * 5000),
    "alpha": ("1", ""),
}  # fmt: skip


def _nonsense(rng: random.Random) -> bytes:
    """A file the gate lets through, with known suffixes on unlikely shapes, dtypes, numbers and metadata."""
    prefix = rng.choice([p for each in dialects() for p, _ in (*each.flat_prefixes, *each.dotted_prefixes)] + [""])
    words = rng.choice(("lora", "lora_e", "hada", "lokr", "oft", ".weight", "vera", "ia3", "diff", "norm", ""))
    always = ("alpha", "scale", "dora_scale", "reshape_weight", "magnitude", "on_input")
    suffixes = [suffix for suffix in SUFFIXES if words in suffix or suffix in always]
    modules = rng.sample(_MODULES, 2)
    tensors: dict[str, tuple[str, list[int]]] = {}
    for _ in range(rng.randint(1, 8)):
        key = f"{prefix}{rng.choice(modules)}.{rng.choice(suffixes)}" if rng.random() < 0.8 else rng.choice(_WHOLE_KEYS)
        shape = [rng.choice((0, 1, 1, 2, 2, 3, 4)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4, 5)))]
        tensors[key] = (rng.choice(["F32"] * 6 + list(BITS)), shape)
    if rng.random() < 0.5:
        kind = rng.choice(
            (("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight"), ("lokr_w1", "lokr_w2"))
        )
        tensors |= {f"{prefix}{modules[0]}.{suffix}": ("F32", [2, 2]) for suffix in kind}
    metadata = {name: rng.choice(values) for name, values in _METADATA.items() if rng.random() < 0.15}
    raw, size = _lay_out(tensors, metadata)
    return pack(raw, rng.randbytes(size))


@pytest.mark.parametrize("shard", range(sized(1, 4)))
def test_nonsense_through_load(tmp_path: Path, shard: int) -> None:
    rng = random.Random(f"nonsense {shard}")
    loaded = sum(_load(tmp_path / "x.safetensors", _nonsense(rng)) for _ in range(1_500))
    assert loaded > 300
