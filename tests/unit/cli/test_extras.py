"""Each command names the extra that it needs, and that extra has everything that the command imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.cli.extras import PACKAGES

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
#: command -> (its extra, arguments that reach the check)
COMMANDS = {
    "bake": ("torch", ["-b", "x", "-l", "y", "-o", "z"]),
    "extract": ("torch", ["x", "y", "-o", "z"]),
    "resize": ("torch", ["x", "-o", "z", "--rank", "2"]),
    "generate": ("generate", ["x"]),
    "demo": ("generate", []),
    "bench": ("generate", ["embedded"]),
    "train": ("train", ["--check"]),
}
BASE = {"numpy", "pydantic", "rich", "safetensors", "typer"}
#: imported only if a setting needs it, with a message of its own
OPTIONAL = {"accelerate", "blake3", "tensorboard", "triton", "yaml"}


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports at run time, also inside functions."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def source_of(module: str) -> Path | None:
    path = SRC.joinpath(*module.split("."))
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


def third_party(start: Path) -> set[str]:
    """Return the packages that a file imports, directly or indirectly."""
    seen, pending, packages = {start}, [start], set()
    while pending:
        for name in imports(pending.pop()):
            if name.split(".")[0] != "inweave":
                packages.add(name.split(".")[0])
            elif (path := source_of(name)) is not None and path not in seen and "cli" not in path.parts:
                seen.add(path)
                pending.append(path)
    return packages - set(sys.stdlib_module_names) - {"inweave"}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_extra_holds_all_that_its_commands_import(command: str) -> None:
    extra = COMMANDS[command][0]
    packages = third_party(SRC / "inweave" / "cli" / f"{command}.py")
    assert packages - BASE - OPTIONAL <= PACKAGES[extra].keys()
    assert PACKAGES[extra].keys() <= packages, "it is asked for and not needed"


@pytest.mark.parametrize("command", ["inspect", "check", "convert", "hash"])
def test_reading_needs_no_extra(command: str) -> None:
    assert third_party(SRC / "inweave" / "cli" / f"{command}.py") <= BASE | OPTIONAL


def test_the_extras_install_what_they_promise() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def requirements(names: list[str]) -> set[str]:
        result: set[str] = set()
        for name in names:
            if name.startswith("inweave["):
                inner = name.removeprefix("inweave[").removesuffix("]").split(",")
                result |= {each for extra in inner for each in requirements(project["optional-dependencies"][extra])}
            else:
                result.add(re.split(r"[\[>;]", name)[0].strip().lower())
        return result

    for extra, packages in PACKAGES.items():
        assert set(packages.values()) <= requirements(project["optional-dependencies"][extra])
    assert requirements(project["dependencies"]) == BASE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_package_is_named_with_the_extra_that_has_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, arguments = COMMANDS[command]
    for module, distribution in PACKAGES[extra].items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            result = CliRunner().invoke(app, [command, *arguments])
            assert result.exit_code == 2
            expected = f'error: this command needs {distribution}; install with: pip install "inweave[{extra}]"\n'
            assert result.output == expected
            result = CliRunner().invoke(app, [command, *arguments, "--json"])
            assert json.loads(result.output)["ok"] is False


_WITHOUT = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
import inweave
for name in {names!r}:
    try:
        print(name, getattr(inweave, name).__name__)
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_the_library_names_the_extra_too() -> None:
    """With torch alone, weaving works and a pipeline says what it needs; without anything, so does weaving."""

    def output(*hidden: str) -> list[str]:
        program = _WITHOUT.format(hidden=hidden, names=["load", "bake", "pipeline", "train"])
        environment = {"PYTHONPATH": str(SRC), "PATH": ""}
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        return run.stdout.splitlines()

    models = ("PIL", "diffusers", "transformers", "huggingface_hub", "accelerate", "yaml")
    loading, baking, generating, training = output("torch", *models)
    assert loading == "load load"
    assert baking == 'bake inweave.bake needs torch; install with: pip install "inweave[torch]"'
    assert generating.endswith('pip install "inweave[generate]"') and training.endswith('pip install "inweave[train]"')
    if pytest.importorskip("torch"):
        loading, baking, generating, training = output(*models)
        assert baking == "bake bake"
        assert generating.startswith("pipeline inweave.pipeline needs ") and "torch;" not in generating
        assert training.startswith("train inweave.train needs ") and "torch;" not in training


def test_a_cluster_names_its_extra_and_a_worker_without_one_never_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        result = CliRunner().invoke(app, ["serve", "--cluster", "--port", "0"])
    assert result.exit_code == 2
    assert result.output == 'error: this command needs ray; install with: pip install "inweave[cluster]"\n'
    program = "import sys, inweave.serve.run, inweave.cli.app; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
