"""Adapter files with real placements on a tiny base, so that damage reaches resolving, weaving, attaching and
converting.

The base is a small torch model with a linear layer, a convolution, an embedding and a norm; the files are LoRA (kohya
and PEFT names), DoRA, LoHa, LoKr, (IA)^3, OFT and whole differences on its modules, with damage to names, shapes,
dtypes, numbers, metadata and configurations that leaves the container itself intact, or to its bytes.
"""

from __future__ import annotations

import json
import math
import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import inweave
from inweave.adapter.tensor import BITS
from inweave.errors import InweaveError
from inweave.exchange.convert import save
from inweave.exchange.load import load, open_base
from inweave.formats.dialects import WRITTEN
from inweave.formats.files import open_container
from inweave.models import embedded
from inweave.targets.index import ModelIndex
from inweave.training.checkpoint.store import State, load_state, save_state
from tests.fuzz import mutate
from tests.fuzz.harness import Reader

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 4, bias=True)
        self.conv = nn.Conv2d(3, 5, 3)
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.block = nn.ModuleDict({"q_proj": nn.Linear(4, 4, bias=False), "fc": nn.Linear(4, 8)})


@cache
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny().requires_grad_(False)


def numbers(rng: random.Random, shape: tuple[int, ...]) -> Entry:
    count = math.prod(shape)
    return "F32", shape, struct.pack(f"<{count}f", *(rng.uniform(-1, 1) for _ in range(count)))


SHAPES: dict[str, tuple[int, ...]] = {"q": (4, 6), "conv": (5, 3, 3, 3), "block.q_proj": (4, 4), "block.fc": (8, 4)}


def factors(rng: random.Random, kind: str, module: str, peft: bool) -> dict[str, Entry]:
    """The tensors of one module in one algorithm."""
    shape = SHAPES[module]
    out, rest = shape[0], shape[1:]
    flat, rank = math.prod(rest), 2
    name = f"base_model.model.{module}" if peft else f"lora_unet_{module.replace('.', '_')}"
    a, b = ("lora_A", "lora_B") if peft else ("lora_down", "lora_up")
    ones = (1,) * (len(rest) - 1)
    if kind in ("lora", "dora"):
        tensors = {f"{a}.weight": numbers(rng, (rank, *rest)), f"{b}.weight": numbers(rng, (out, rank, *ones))}
        if kind == "dora":
            tensors["lora_magnitude_vector" if peft else "dora_scale"] = numbers(
                rng, (out,) if peft else (out, *(1 for _ in rest))
            )
    elif kind == "loha":
        tensors = {
            "hada_w1_a": numbers(rng, (out, rank)), "hada_w1_b": numbers(rng, (rank, flat)),
            "hada_w2_a": numbers(rng, (out, rank)), "hada_w2_b": numbers(rng, (rank, flat)),
        }  # fmt: skip
    elif kind == "lokr":
        tensors = {"lokr_w1": numbers(rng, (2, 1)), "lokr_w2": numbers(rng, (out // 2 or 1, *rest))}
    elif kind == "ia3":
        tensors = {"ia3_l" if peft else "weight": numbers(rng, (out, 1) if peft else (out,))}
    elif kind == "oft":
        tensors = {"oft_blocks": numbers(rng, (2, out // 2 or 1, out // 2 or 1))}
    else:
        tensors = {"diff": numbers(rng, shape)}
    if not peft:
        tensors["alpha"] = ("F32", (), struct.pack("<f", rng.choice((1.0, 2.0, 0.5))))
    return {f"{name}.{role}": entry for role, entry in tensors.items()}


CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q", "q_proj"], "rank_pattern": {"q": 2},
    "alpha_pattern": {"fc": 1.0}, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none",
    "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None, "task_type": None,
    "base_model_name_or_path": "x", "inference_mode": True, "lora_dropout": 0.0,
}  # fmt: skip
METADATA = {
    "ss_network_dim": "2", "ss_network_alpha": "2.0", "ss_network_args": '{"algo": "loha"}',
    "ss_base_model_version": "sd_v1", "format": "pt", "ss_tag_frequency": '{"a": {"cat": 3}}',
    "modelspec.architecture": "stable-diffusion-v1/lora", "ss_output_name": "x",
    "lora_adapter_metadata": '{"unet.lora_alpha": 4, "unet.r": 2}', "sshs_model_hash": "0" * 64,
}  # fmt: skip
KINDS = ("lora", "lora", "lora", "dora", "loha", "lokr", "ia3", "oft", "diff")


def pack(tensors: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode("utf-8", "replace")
    return len(raw).to_bytes(8, "little") + raw + data


def whole(rng: random.Random) -> tuple[dict[str, Entry], bool]:
    peft = rng.random() < 0.5
    tensors: dict[str, Entry] = {}
    for module in rng.sample(list(SHAPES), rng.randrange(1, 4)):
        tensors |= factors(rng, rng.choice(KINDS), module, peft)
    return tensors, peft


def damage(rng: random.Random, tensors: dict[str, Entry]) -> None:
    """Something wrong with one tensor: its name, its shape, its dtype or its numbers."""
    name = rng.choice(list(tensors))
    dtype, shape, raw = tensors[name]
    action = rng.randrange(9)
    if action == 0:
        del tensors[name]
    elif action == 1:
        tensors[
            rng.choice(
                (mutate.text(rng, [name])[:520], name + ".1", name.replace("weight", "default.weight"), name.upper())
            )
        ] = tensors.pop(name)
    elif action == 2 and shape:
        changed = list(shape)
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 7, 64))
        tensors[name] = dtype, tuple(changed), bytes(math.prod(changed) * BITS.get(dtype, 8) // 8)
    elif action == 3:
        tensors[name] = dtype, rng.choice(((math.prod(shape),), (1, *shape), (*shape, 1), tuple(reversed(shape)))), raw
    elif action == 4:
        other = rng.choice(("F16", "BF16", "F64", "I8", "I64", "U8", "F8_E4M3", "F8_E8M0", "BOOL", "F4", "C64"))
        bits = BITS.get(other, 8)
        tensors[name] = other, shape, bytes(math.prod(shape) * bits // 8)
    elif action == 5:
        tensors[name] = dtype, shape, rng.randbytes(len(raw))  # NaN, infinity and 1e38 among them
    elif action == 6:
        tensors[name] = dtype, (), raw[:4] or bytes(4)
    elif action == 7:
        suffix = rng.choice(
            (
                ".alpha",
                ".dora_scale",
                ".lora_mid.weight",
                ".hada_t1",
                ".lokr_t2",
                ".bias",
                ".rescale",
                ".diff_b",
                ".scale",
                ".g_idx",
            )
        )
        tensors[name.rsplit(".", 1)[0] + suffix] = numbers(rng, rng.choice(((), (1,), (2, 2), (4,), (2, 2, 3, 3))))
    else:
        tensors[name + rng.choice((".weight", "_", ".lora_A.weight", ""))] = tensors[name]


def make_file(rng: random.Random) -> tuple[bytes, None]:
    tensors, _ = whole(rng)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        if tensors:
            damage(rng, tensors)
    metadata = {}
    if rng.random() < 0.5:
        metadata = {
            str(key)[:300]: mutate.text(rng, [value]) if rng.random() < 0.3 else value
            for key, value in METADATA.items()
        }
        if rng.random() < 0.5:
            field = rng.choice(list(metadata))
            metadata[field] = json.dumps(
                mutate.document(rng, json.loads(rng.choice(('{"a": {"cat": 3}}', '{"algo": "loha"}', "[1]"))))
            )
    raw = pack(tensors, metadata)
    return (mutate.damaged(rng, raw) if rng.random() < 0.1 else raw), None


def read_file(value: tuple[bytes, Any], folder: Path) -> None:
    """Every road that a file can take: each may refuse it, and none may fail."""
    raw, config = value
    target = folder / "adapter"
    target.mkdir(exist_ok=True)
    path = target / ("adapter_model.safetensors" if config is not None else "a.safetensors")
    for old in target.iterdir():
        old.unlink()
    path.write_bytes(raw)
    if config is not None:
        (target / "adapter_config.json").write_bytes(config.encode("utf-8", "replace"))
    adapter = load(path)
    assert len(repr(adapter)) < 10_000
    refused: list[InweaveError] = []

    def attempt(road: Any) -> None:
        try:
            road()
        except InweaveError as error:
            refused.append(error)

    attempt(lambda: json.dumps(inweave.inspect(path, keys=True).as_dict(), allow_nan=False))
    attempt(lambda: json.dumps(inweave.check(adapter, inweave.index_of(model())).as_dict(), allow_nan=False))
    attempt(lambda: weave(path))
    attempt(lambda: attach(adapter))
    dialect = sorted(WRITTEN)[len(raw) % len(WRITTEN)]
    out = folder / ("out" if dialect == "peft" else "out.safetensors")
    attempt(lambda: load(save(adapter, out, dialect=dialect, base=inweave.index_of(model()), drop=True).path))
    if refused:
        raise refused[0]


def weave(path: Path) -> None:
    """Applied and taken back: the weights are the same bits again, and finite in between."""
    before = {name: tensor.clone() for name, tensor in model().state_dict().items()}
    weaver = inweave.Weaver(model())
    try:
        weaver.apply([inweave.load(path)])
        assert all(torch.isfinite(tensor).all() for tensor in model().state_dict().values()), "not finite"
    finally:
        weaver.apply([])
        for name, tensor in model().state_dict().items():
            assert torch.equal(tensor, before[name]), name


def attach(adapter: Any) -> None:
    inweave.attach(model(), adapter)
    inweave.eject(model())


def make_peft(rng: random.Random) -> tuple[bytes, str]:
    tensors: dict[str, Entry] = {}
    for module in ("q", "block.q_proj"):
        tensors |= factors(rng, rng.choice(("lora", "lora", "dora")), module, peft=True)
    text = json.dumps(mutate.document(rng, CONFIG))
    return pack(tensors, {}), mutate.text(rng, [text]) if rng.random() < 0.2 else text


def good(config: bool) -> tuple[bytes, str | None]:
    tensors = factors(random.Random(0), "lora", "q", peft=True) | factors(
        random.Random(0), "lora", "block.q_proj", peft=True
    )
    return pack(tensors, {}), json.dumps({**CONFIG, "rank_pattern": {}, "alpha_pattern": {}}) if config else None


# -- names of a real family: read, checked and converted on the embedded model


@cache
def style() -> dict[str, dict[str, Entry]]:
    """The tensors of an adapter that comes with the package, by module; small ones only."""
    modules: dict[str, dict[str, Entry]] = {}
    for name, tensor in open_container(next(iter(embedded.loras().values()))).tensors.items():
        if len(tensor.data) < 10_000:
            modules.setdefault(name.split(".")[0], {})[name] = tensor.dtype, tensor.shape, bytes(tensor.data)
    return {module: tensors for module, tensors in modules.items() if len(tensors) > 2}


@cache
def base() -> ModelIndex:
    return open_base(embedded.folder())


def make_style(rng: random.Random) -> bytes:
    tensors = {name: entry for module in rng.sample(sorted(style()), 3) for name, entry in style()[module].items()}
    for _ in range(rng.choice((0, 1, 1, 2))):
        damage(rng, tensors)
    return pack(tensors, METADATA if rng.random() < 0.3 else {})


def read_style(value: bytes, folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(value)
    adapter = load(path)
    inweave.check(adapter, base())
    dialect = sorted(WRITTEN)[len(value) % len(WRITTEN)]
    out = folder / ("out" if dialect == "peft" else "out.safetensors")
    load(save(adapter, out, dialect=dialect, base=base(), drop=True).path)


# -- an index of shards


def make_shards(rng: random.Random) -> dict[str, bytes]:
    tensors = factors(rng, "lora", "q", peft=True)
    names = list(tensors)
    parts = {"a-1.safetensors": names[:1], "a-2.safetensors": names[1:]}
    index: dict[str, Any] = {
        "metadata": {"total_size": 1},
        "weight_map": {name: part for part, keys in parts.items() for name in keys},
    }
    files = {part: pack({name: tensors[name] for name in keys}, {}) for part, keys in parts.items()}
    text = json.dumps(mutate.document(rng, index))
    files["a.safetensors.index.json"] = (mutate.text(rng, [text]) if rng.random() < 0.3 else text).encode(
        "utf-8", "replace"
    )
    return files


def read_shards(value: dict[str, bytes], folder: Path) -> None:
    for name, raw in value.items():
        (folder / name).write_bytes(raw)
    load(folder / "a.safetensors.index.json")
    inweave.check(folder / "a.safetensors.index.json", inweave.index_of(model()))


def good_shards() -> dict[str, bytes]:
    tensors = factors(random.Random(0), "lora", "q", peft=True)
    index = {"weight_map": dict.fromkeys(tensors, "a-1.safetensors")}
    return {"a-1.safetensors": pack(tensors, {}), "a.safetensors.index.json": json.dumps(index).encode()}


# -- checkpoints of a run


@cache
def checkpoint() -> tuple[dict[str, Any], bytes]:
    import tempfile

    facts = {
        "config": {"rank": 4, "steps": 10},
        "data": "0" * 64,
        "base": "1" * 64,
        "started": 1.5,
        "validation": [[1, 0.5]],
    }
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"parameters": torch.arange(8.0), "optimizer.exp_avg": torch.zeros(8), "counter": torch.tensor(3)}
        place = save_state(Path(folder), State(7, tensors, facts), keep=0)
        return json.loads((place / "state.json").read_text()), (place / "state.safetensors").read_bytes()


def make_checkpoint(rng: random.Random) -> tuple[str, bytes]:
    facts, raw = checkpoint()
    if rng.random() < 0.3:
        return json.dumps(facts), mutate.damaged(rng, raw)
    changed = mutate.document(rng, facts)
    if isinstance(changed, dict) and rng.random() < 0.5:
        changed.pop("facts_sum", None)  # as earlier versions wrote it, so that the rest is looked at
    text = json.dumps(changed)
    return mutate.text(rng, [text]) if rng.random() < 0.2 else text, raw


def read_checkpoint(value: tuple[str, bytes], folder: Path) -> None:
    place = folder / "step-000007"
    place.mkdir(exist_ok=True)
    (place / "state.json").write_bytes(value[0].encode("utf-8", "replace"))
    (place / "state.safetensors").write_bytes(value[1])
    load_state(place)


ADAPTER_READERS = (
    Reader("adapter", good(config=False), make_file, read_file, 3),
    Reader("peft", good(config=True), make_peft, read_file, 3),
    Reader("style", pack(next(iter(style().values())), {}), make_style, read_style, 3),
    Reader("shards", good_shards(), make_shards, read_shards, 3),
    Reader("checkpoint", (json.dumps(checkpoint()[0]), checkpoint()[1]), make_checkpoint, read_checkpoint, 6),
)
