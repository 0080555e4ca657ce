"""The arrows of docs/architecture.md: an import may only point down."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.arch.layout import FILES, PACKAGES, SRC, imports_of, package_of, tree_of


def violations(rule: Callable[[Path], Iterator[str]]) -> list[str]:
    """Every violation of a rule, in all files: one test reports all of them."""
    return [f"{path.relative_to(SRC)}: {what}" for path in FILES for what in rule(path)]


def test_imports_point_down() -> None:
    def upward(path: Path) -> Iterator[str]:
        here = package_of(path)
        for name in sorted(imports_of(path)):
            there = name.split(".")[1] if name.startswith("inweave.") else here
            if there != here and PACKAGES[there].height >= PACKAGES[here].height:
                yield f"{here} imports {name}"

    assert violations(upward) == []


def test_third_party_imports_are_those_of_the_page() -> None:
    def foreign(path: Path) -> Iterator[str]:
        known = {"inweave", "__future__", *sys.stdlib_module_names, *PACKAGES[package_of(path)].libraries}
        yield from (f"imports {name}" for name in sorted(imports_of(path)) if name.split(".")[0] not in known)

    assert violations(foreign) == []


def test_one_package_knows_the_model_libraries() -> None:
    for library in ("diffusers", "transformers", "huggingface_hub"):
        assert [name for name, package in PACKAGES.items() if library in package.libraries] == ["models"]


def test_every_package_has_a_place() -> None:
    packages = {package_of(path) for path in FILES}
    assert packages == PACKAGES.keys()


def test_files_stay_small_and_say_what_they_are() -> None:
    def size_and_purpose(path: Path) -> Iterator[str]:
        text = path.read_text("utf-8")
        if len(text.splitlines()) > 400:
            yield f"{len(text.splitlines())} lines, at most 400"
        if not ast.get_docstring(tree_of(path)):
            yield "has no docstring"

    assert violations(size_and_purpose) == []


def test_nothing_unpickles_or_walks_attributes_by_file_names() -> None:
    for path in FILES:
        for name in imports_of(path):
            assert name.split(".")[0] not in ("pickle", "shelve", "marshal"), path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr == "load":
                owner = node.value
                assert not (isinstance(owner, ast.Name) and owner.id == "torch"), f"{path}: torch.load"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("setattr", "eval", "exec", "delattr"), f"{path}: {node.func.id}"


#: modules that fill a temporary folder of their own, which nobody else can name
_OWN_FOLDERS = {"models/bundled.py", "models/tokenizers.py", "cli/launch.py"}


def test_files_are_written_and_images_are_opened_in_one_place() -> None:
    """`inweave.files` writes whole files through no link, and opens no image that could start a program."""

    def elsewhere(path: Path) -> Iterator[str]:
        if package_of(path) in ("files", "serve") or str(path.relative_to(SRC)) in _OWN_FOLDERS:
            return
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            writes = node.func.attr == "open" and any(set(mode) & set("wax+") for mode in modes if len(mode) < 4)
            image = isinstance(node.func.value, ast.Name) and node.func.value.id == "Image" and node.func.attr == "open"
            if node.func.attr in ("write_text", "write_bytes") or writes or image:
                yield f"line {node.lineno}: {ast.unparse(node.func)}"

    assert violations(elsewhere) == []


def test_images_are_opened_with_a_list_of_formats() -> None:
    def any_format(path: Path) -> Iterator[str]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
                if "formats" not in [keyword.arg for keyword in node.keywords]:
                    yield f"line {node.lineno}: Pillow would try every format that it knows"

    assert violations(any_format) == []


READING = Path(__file__).parents[1] / "data" / "files" / "cloneofsimo_lora_disney.safetensors"
MODEL_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "huggingface_hub", "triton", "pickle5")
WEB = ("fastapi", "starlette", "uvicorn", "prometheus_client", "asyncio")
REST = ("scipy", "pydantic", "PIL", "yaml", "inweave.training", "inweave.generate", "inweave.serve", "inweave.bench")

#: command line -> what it must not import: each is a tenth of a second to seconds of its start
LEFT_OUT = {
    "--help": (*MODEL_LIBRARIES, *WEB, *REST, "numpy"),
    "version": (*MODEL_LIBRARIES, *WEB, *REST, "numpy", "rich.console"),
    "serve --help": (*MODEL_LIBRARIES, *WEB, "scipy", "PIL", "numpy"),
    "train --help": (*MODEL_LIBRARIES, *WEB, "scipy", "PIL", "numpy"),
    "generate --help": (*MODEL_LIBRARIES, *WEB, *REST, "numpy"),
    "inspect FILE": (*MODEL_LIBRARIES, *WEB, *REST, "numpy", "rich.console"),
    "check FILE --base sd1.5": (*MODEL_LIBRARIES, *WEB, *REST, "rich.console"),
    "hash FILE": (*MODEL_LIBRARIES, *WEB, *REST, "numpy", "rich.console"),
    "convert FILE OUT --to kohya": (*MODEL_LIBRARIES, *WEB, *REST, "numpy", "rich.console"),
    "library list": (*MODEL_LIBRARIES, *WEB, "scipy", "inweave.generate", "inweave.training"),
}


@pytest.mark.parametrize("line", LEFT_OUT)
def test_a_command_imports_what_it_needs_alone(line: str, tmp_path: Path) -> None:
    words = {"FILE": str(READING), "OUT": str(tmp_path / "out.safetensors")}
    arguments = [words.get(word, word) for word in line.split()]
    program = (
        "import sys\n"
        "from inweave.cli.app import app\n"
        f"try:\n    app({arguments!r})\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        f"needless = set({LEFT_OUT[line]!r}) & set(sys.modules)\n"
        "assert not needless, needless\n"
        "sys.exit(code)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_is_sorted_and_importable() -> None:
    import inweave

    assert inweave.__all__ == sorted(inweave.__all__)
    for name in inweave.__all__:
        assert getattr(inweave, name) is not None
    with pytest.raises(AttributeError):
        inweave.no_such_name  # noqa: B018


def test_the_old_name_lives_only_in_the_picture_of_the_loom() -> None:
    """The base is the warp and an adapter is the weft; nowhere else, since that name is another project's."""
    root = SRC.parents[1]
    if not (root / ".git").exists():
        pytest.skip("git names the files of the project; this is a copy without it")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
    old = "we" + "ft"
    allowed = re.compile(rf"(?:an )?adapter(?: is|:)? the {old}\b", re.IGNORECASE)
    for name in filter(None, listed.decode().split("\0")):
        path = root / name
        assert old not in name.lower(), name
        if name != "tests/arch/test_imports.py" and path.is_file():
            content = path.read_bytes()
            if old.encode() in content.lower():  # of most files that is all
                text = allowed.sub("", content.decode("utf-8", "replace"))
                assert old not in text.lower(), f"{name} says {old}"
