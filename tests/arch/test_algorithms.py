"""An algorithm is one class per tier: no other module names such a class or branches on its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.arch.layout import SRC, tree_of

from inweave.adapter import ALGORITHMS

CLASSES = {algorithm.__name__ for algorithm in ALGORITHMS.values()} | {
    algorithm.layer.partition(":")[2] for algorithm in ALGORITHMS.values() if algorithm.layer
}
KINDS = set(ALGORITHMS) - {"full"}  # "full" also means gradient checkpointing and value checks
#: where algorithms are defined
HOMES = ("adapter/", "ops/delta/", "layers/experts.py", "layers/lora.py", "layers/loha.py", "layers/lokr.py")
#: other modules that know one, and why
EXCEPTIONS = {
    "formats/dialects/candle.py": "candle-lora holds LoRA pairs alone, in a layout of its own",
    "formats/dialects/peft.py": "adapter_config.json has fields for whole modules and token rows",
    "layers/collect.py": "modules that were trained whole become `Full` entries",
    "layers/fused.py": "kernels of a low-rank pair",
    "layers/fused_conv.py": "kernels of a low-rank pair",
    "layers/norms.py": "differences of normalization layers are `Full` entries",
    "layers/plan.py": "kernels of a low-rank pair",
    "layers/siblings.py": "kernels of a low-rank pair",
    "weights/beside.py": "a low-rank pair beside a quantized weight",
    "weights/factors.py": "kernels of a low-rank pair",
    "weights/layout_cache.py": "kernels of a low-rank pair",
    "weights/merge.py": "kernels of a low-rank pair",
    "weights/offline/extract.py": "makes LoRAs and whole differences",
    "weights/offline/resize.py": "makes LoRAs and whole differences",
    "generate/infotext.py": "the words of prompts: <lora:NAME>",
    "generate/prompt.py": "the words of prompts: <lora:NAME>",
    "library/layouts.py": "which keys of a header to read before the adapter itself",
}
#: settings of training and of other trainers, which name networks by words of their own
SETTINGS = ("training/config/", "training/importers/", "training/memory/", "training/adapters/")
FILES = sorted(path for path in SRC.rglob("*.py"))


def uses(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of every class of an algorithm that is imported, and of every kind that decides something."""
    result: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            result += [(node.lineno, alias.name) for alias in node.names if alias.name in CLASSES]
        elif isinstance(node, ast.Compare):
            words = {each.value for part in (node.left, *node.comparators) for each in ast.walk(part)
                     if isinstance(each, ast.Constant) and isinstance(each.value, str)}  # fmt: skip
            result += [(node.lineno, word) for word in sorted(words & KINDS)]
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in KINDS:
            result.append((node.lineno, str(node.value.value)))
    return result


def test_algorithms_are_known_in_their_own_modules_alone() -> None:
    known: dict[str, list[tuple[int, str]]] = {}
    for path in FILES:
        name = path.relative_to(SRC).as_posix()
        if not name.startswith((*HOMES, *SETTINGS)) and (found_here := uses(tree_of(path))):
            known[name] = found_here
    assert {name: places for name, places in known.items() if name not in EXCEPTIONS} == {}
    needless = [name for name in EXCEPTIONS if name not in known and not name.startswith(SETTINGS)]
    assert needless == [], "exceptions that are no longer needed"


@pytest.mark.parametrize(
    "text",
    ["from inweave.adapter import Entry, Loha", "from inweave.layers.lora import LoraBranch", "x = kind == 'loha'",
     "x = kind in ('lora', 'lokr')", "match kind:\n    case 'oft':\n        pass"],
)  # fmt: skip
def test_such_a_use_is_seen(text: str) -> None:
    assert uses(ast.parse(text))


def test_every_algorithm_is_complete() -> None:
    for algorithm in ALGORITHMS.values():
        assert algorithm.formula or algorithm.replacement, algorithm
        assert "recognize" in vars(algorithm) and "shape" in vars(algorithm), algorithm
        for reference in filter(None, (algorithm.formula, algorithm.replacement, algorithm.layer)):
            module, _, name = reference.partition(":")
            path = SRC.parent / Path(*module.split(".")).with_suffix(".py")
            assert f" {name}(" in path.read_text("utf-8"), reference
