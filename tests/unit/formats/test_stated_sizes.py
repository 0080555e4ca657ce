"""Every number of an adapter file that a merge would allocate or count by: refused by name before a merge begins."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.formats.files import write_file
from inweave.targets.index import index_from_names
from tests.support import random, stopwatch, tensor, zeros

INDEX = index_from_names({"x.weight": (64, 64), "x.bias": (64,), "e.weight": (100, 64)}, source="x")
PAIR = {"lora_up.weight": random(1, 64, 2), "lora_down.weight": random(2, 2, 64)}
SPARSE = {"bias_values": tensor([1.0])}


def whole(*numbers: int) -> Tensor:
    return Tensor("I64", (len(numbers),), np.array(numbers, np.int64).tobytes())


def at(row: int, column: int) -> Tensor:
    return Tensor("I64", (2, 1), np.array([[row], [column]], np.int64).tobytes())


ATTACKS: dict[str, tuple[dict[str, Tensor], str]] = {
    "a width for a layer that fits": (PAIR | {"reshape_weight": whole(1 << 40, 1 << 40)}, "reshape_weight widens"),
    "a negative width": (PAIR | {"reshape_weight": whole(-64, -64)}, "reshape_weight widens it to [-64, -64]"),
    "a row beyond the size": (PAIR | SPARSE | {"bias_indices": at(1 << 40, 0), "bias_size": whole(64, 64)}, "has row"),
    "a negative row": (PAIR | SPARSE | {"bias_indices": at(-1, 0), "bias_size": whole(64, 64)}, "has row -1"),
    "a column beyond the size": (PAIR | SPARSE | {"bias_indices": at(0, 64), "bias_size": whole(64, 64)}, "column 64"),
    "a size that overflows": (PAIR | SPARSE | {"bias_indices": at(0, 0), "bias_size": whole(1 << 62, 4)}, "bias_size"),
    "butterflies wider than the layer": ({"oft_blocks": zeros((5, 8, 8, 8))}, "5 butterfly stages"),
    "butterflies of odd blocks": ({"oft_blocks": zeros((2, 64, 1, 1))}, "an even block size"),
    "butterflies on the inputs": ({"boft_R": zeros((300, 8, 8, 8)), "boft_s": zeros((64, 1))}, "300 butterfly stages"),
    "Kronecker factors of a huge product": ({"lokr_w1": zeros((4096, 1)), "lokr_w2": zeros((1, 4096))}, "[4096, 4096]"),
    "Hadamard factors of a huge product": (
        {f"hada_w{n}_{side}": zeros(shape) for n in "12" for side, shape in (("a", (4096, 1)), ("b", (1, 4096)))},
        "[4096, 4096]",
    ),
    "a huge product": ({"lora_up.weight": zeros((1 << 16, 1)), "lora_down.weight": zeros((1, 1 << 16))}, "65536"),
    "a Tucker core": (
        {f"lora_{role}.weight": zeros(shape)
         for role, shape in (("up", (64, 2)), ("down", (2, 64, 1, 1)), ("mid", (2, 2, 64, 64)))},
        "[64, 64, 64, 64]",
    ),
    "blocks wider than the layer": ({"oft_blocks": zeros((1, 256, 256))}, "[256, any]"),
    "a shared block wider than the layer": ({"oft_R.weight": zeros((1, 256 * 255 // 2))}, "[any, 256]"),
    "a magnitude of another size": (PAIR | {"dora_scale": zeros((4096, 1))}, "the magnitude has 4,096 numbers"),
    "an empty pair": ({"lora_up.weight": zeros((64, 0)), "lora_down.weight": zeros((0, 64))}, "the ranks differ"),
    "alpha that is not a number": (PAIR | {"alpha": tensor(float("nan"))}, "one finite number"),
    "an infinite scale": (PAIR | {"scale": tensor(float("inf"))}, "one finite number"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_size_that_does_not_fit_is_refused_at_no_cost(attack: str, tmp_path: Path) -> None:
    tensors, reason = ATTACKS[attack]
    path = write_file(tmp_path / "a.safetensors", {f"lora_unet_x.{role}": value for role, value in tensors.items()})
    inweave.check(path, INDEX)
    tracemalloc.start()
    with stopwatch(time.process_time) as cost:
        verdict = inweave.check(path, INDEX)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    findings = json.dumps(verdict.as_dict())
    assert not verdict.ok and reason in findings, findings
    assert cost.seconds < 2 and peak < 4_000_000 + 2 * path.stat().st_size


FACTORS = {"x.lokr_w1": random(1, 8, 8), "x.lokr_w2": random(2, 8, 8)}
VERA = {"x.vera_lambda_b": zeros((64,)), "vera_B": zeros((64, 8))}


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (FACTORS, {"peft_type": "LOKR", "alpha": 1, "r": 10**200}, "r must be 0 to"),
        (FACTORS, {"peft_type": "LOKR", "alpha": 1, "r": -1, "use_rslora": True}, "r must be 0 to"),
        (FACTORS, {"peft_type": "LOKR", "alpha": 1, "r": 4, "rank_pattern": {"x": 1e29}}, "rank_pattern must map"),
        ({"x.oft_R.weight": random(1, 8, 28)}, {"peft_type": "OFT", "num_cayley_neumann_terms": 10**9}, "1 to 100"),
        ({"x.oft_R.weight": random(1, 8, 28)}, {"peft_type": "OFT", "num_cayley_neumann_terms": -5}, "1 to 100"),
        (
            VERA | {"x.vera_lambda_d": zeros((1 << 20,)), "vera_A": zeros((8, 64))},
            {"peft_type": "VERA"},
            "do not make a product",
        ),
        (VERA | {"x.vera_lambda_d": zeros((8,)), "vera_A": zeros((8, 32))}, {"peft_type": "VERA"}, "the base has"),
        (
            {"e.token_adapter.trainable_tokens_delta": zeros((1, 64))},
            {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "trainable_token_indices": [2**31 - 1]},
            "the base has",
        ),
    ],
)
def test_numbers_of_a_configuration(
    tensors: dict[str, Tensor], config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    write_file(tmp_path / "adapter_model.safetensors", {f"base_model.model.{name}": t for name, t in tensors.items()})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    try:
        findings = json.dumps(inweave.check(tmp_path, INDEX).as_dict())
    except FormatError as error:
        findings = str(error)
    assert re.search(reason, findings), findings
