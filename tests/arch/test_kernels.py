"""The kernel folders of `ops`: one scheme of module names, a definition next to every kernel, one kind of operator."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.arch.layout import SRC, imports_of, tree_of

OPS = SRC / "ops"
#: the roles of modules in a kernel folder
ROLES = {
    "reference": "the definition in plain torch",
    "triton": "kernels and their launchers",
    "autograd": "the entry point: autograd functions and operators",
    "select": "which implementation runs",
    "meta": "shapes for tracing and for the memory planner",
}
#: kernel folder -> modules about a subject of their own
SUBJECTS = {
    "activation": set(),
    "adam8bit": set(),
    "attention": {"fixed_order", "kernels"},
    "conv": set(),
    "fp8": {"feed_forward"},
    "group_norm": set(),
    "linear": {"conv", "cublas", "frozen"},
    "merge": set(),
    "residual": set(),
    "rotary": {"packed"},
    "row_norm": set(),
    "rowwise": {"table"},
}
#: folders without kernels: shared code, tensors as such, formulas, contracts with registries
OTHERS = {"common", "delta", "kinds", "quantized", "tensors"}


def modules_of(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_every_folder_is_listed() -> None:
    folders = {path.parent.name for path in OPS.glob("*/__init__.py")}
    assert folders == SUBJECTS.keys() | OTHERS
    assert modules_of(OPS) == set(), "operations have folders"


def test_modules_of_kernel_folders_have_the_names_of_their_roles() -> None:
    for name, subjects in SUBJECTS.items():
        modules = modules_of(OPS / name)
        assert modules - ROLES.keys() == subjects, name
        assert "triton" not in modules or "reference" in modules, f"{name} has kernels without a definition"


def test_kernels_are_in_triton_modules() -> None:
    for path in OPS.rglob("*.py"):
        libraries = {name.split(".")[0] for name in imports_of(path)}
        assert "triton" not in libraries or path.stem == "triton" or path == OPS / "common" / "exponential.py", path


def test_launchers_are_named_after_their_definitions() -> None:
    for name in SUBJECTS:
        folder = OPS / name
        if (folder / "triton.py").exists():
            launchers, definitions = (functions_of(folder / f"{role}.py") for role in ("triton", "reference"))
            assert launchers & definitions, name


def functions_of(path: Path) -> set[str]:
    return {node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef)}


def test_operators_are_registered_in_one_place() -> None:
    registering = {"define", "impl", "custom_op", "triton_op", "register_fake", "register_autograd", "register_kernel"}
    for path in SRC.rglob("*.py"):
        calls = {
            node.attr
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.library"
        }
        assert not calls & registering or path == OPS / "common" / "operators.py", path


def test_every_operator_is_registered_by_an_entry_module() -> None:
    for path in OPS.rglob("*.py"):
        if "inweave.ops.common.operators" in imports_of(path):
            assert path.stem == "autograd" or path.stem in SUBJECTS.get(path.parent.name, ()), path
