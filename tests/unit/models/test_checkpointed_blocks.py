"""Blocks of diffusers' transformers get the same arguments with and without gradient checkpointing.

One that gets fewer arguments computes something else, silently: only Chroma has such blocks; its family repairs them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

diffusers = pytest.importorskip("diffusers")

FOLDER = Path(diffusers.__file__).parent / "models" / "transformers"
CHECKPOINT = "_gradient_checkpointing_func"
#: arguments that are None unless a caller asks for something that is not trained
UNUSED = frozenset({"attention_kwargs", "joint_attention_kwargs", "None"})


def left_out(code: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The class, and the arguments that only one of two calls of a block has: checkpointed, and not."""
    for kind in (node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)):
        for branch in (node for node in ast.walk(kind) if isinstance(node, ast.If) and node.orelse):
            first = next((call for call in _calls(branch.body) if ast.unparse(call.func).endswith(CHECKPOINT)), None)
            if first is None or "gradient_checkpointing" not in ast.unparse(branch.test):
                continue
            block = ast.unparse(first.args[0])
            plain = next((call for call in _calls(branch.orelse) if ast.unparse(call.func) == block), None)
            if plain is not None and (apart := (_arguments(first) - {block} ^ _arguments(plain)) - UNUSED):
                yield kind.name, frozenset(apart)


def _calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    return (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call))


def _arguments(call: ast.Call) -> set[str]:
    return {ast.unparse(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))}


def test_only_chroma_leaves_an_argument_of_its_blocks_out() -> None:
    codes = [path.read_text("utf-8") for path in sorted(FOLDER.glob("transformer_*.py"))]
    assert sum(code.count(CHECKPOINT) for code in codes) > 50
    differences = [each for code in codes if CHECKPOINT in code for each in left_out(code)]
    assert differences == [("ChromaTransformer2DModel", frozenset({"attention_mask"}))]
