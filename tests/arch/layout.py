"""The layout of the package: what `tests/arch` enforces and what docs/architecture.md is generated from.

`PACKAGES` lists every package from the bottom up with its height: an import may only point to a smaller height, so
packages of one height do not know each other. `ROOMS` lists the folders and modules inside a package in the order of
their imports: a room may only import rooms before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.arch.words import parsed

SRC = Path(__file__).parents[2] / "src" / "inweave"


class Package(NamedTuple):
    """A package: its height, what it does, and the third-party libraries that it may import."""

    height: int
    purpose: str
    libraries: tuple[str, ...] = ()


PACKAGES = {
    "errors": Package(0, "one tree of errors, drawn in its docstring"),
    "version": Package(0, "the version"),
    "plugins": Package(1, "algorithms and families of other packages, through entry points"),
    "arguments": Package(2, "wrong types of arguments as `ConfigError`"),
    "checked": Package(2, "configurations that raise `ConfigError` with every problem", ("pydantic",)),
    "files": Package(2, "open, read and write files from untrusted sources", ("PIL",)),
    "adapter": Package(2, "the canonical adapter: tensors, one class per algorithm, strengths"),
    "patterns": Package(2, "regular expressions matched in bounded time"),
    "formats": Package(3, "adapter files: containers, dialects, reading and writing", ("numpy", "safetensors")),
    "targets": Package(3, "names of a model's tensors: known bases, name tables, resolving, detection"),
    "ops": Package(3, "mathematics and kernels: the formula of each algorithm, fused operations",
        ("torch", "triton", "numpy")),
    "exchange": Package(4, "files and models joined: load, check, inspect, convert, hash"),
    "weights": Package(5, "merge while loading, hot-swap in a live model, bake, extract, resize",
        ("torch", "safetensors", "numpy")),
    "layers": Package(5, "adapters as layers of any torch model", ("torch",)),
    "models": Package(
        6, "model families and their files; the only importer of the model libraries",
        ("torch", "numpy", "diffusers", "transformers", "tokenizers", "huggingface_hub"),
    ),
    "generate": Package(7, "one request to images", ("torch", "numpy", "PIL", "pydantic")),
    "training": Package(
        8, "a dataset to an adapter", ("torch", "numpy", "PIL", "pydantic", "safetensors", "yaml", "accelerate")
    ),
    "library": Package(8, "an index of LoRA folders: names, hashes, facts, sidecar files"),
    "serve": Package(
        9, "the HTTP worker: APIs, durable jobs, the model process, the web page",
        ("PIL", "pydantic", "fastapi", "starlette", "uvicorn", "h11", "sse_starlette", "prometheus_client", "psycopg",
         "ray", "boto3", "botocore", "urllib3"),
    ),
    "bench": Package(
        9, "benchmarks with peers, and the quality of the embedded model",
        ("numpy", "PIL", "torch", "peft", "pydantic", "safetensors"),
    ),
    "demo": Package(10, "the story and the page of `inweave demo`", ("PIL",)),
    "cli": Package(11, "commands: parse, call, print", ("typer", "rich", "ray")),
    "__main__": Package(12, "`python -m inweave`"),
    "__init__": Package(12, "the public names, imported when first used"),
}  # fmt: skip

#: package -> its rooms with their purpose, in the order of imports
ROOMS = {
    "ops": {
        "common": "code that kernels share: operators, gradients, selection, memory layout, precision",
        "tensors": "bytes of files as tensors, shared memory, devices and dtypes by name",
        "delta": "the change of a weight: the formula of each algorithm",
        "kinds": "kinds of layers and how each applies a change, wrapper modules",
        "activation": "GEGLU and the tanh GELU",
        "adam8bit": "AdamW with moments in 8 bits",
        "attention": "the fastest of the libraries' kernels for each shape, measured",
        "conv": "convolution with a frozen weight",
        "group_norm": "group normalization and SiLU of channels-last images",
        "merge": "many low-rank products added to many weights in one launch",
        "residual": "the sum at the end of a residual block, with biases",
        "rotary": "heads of attention, normalized, rotated and joined",
        "rowwise": "low-rank products added to the rows of a batch, other ones to each row",
        "row_norm": "layer and RMS normalization with the sum before it",
        "fp8": "products of rows in 8-bit floating point",
        "quantized": "formats of quantized weights: the contract and the registry",
        "linear": "a linear layer or a convolution with a LoRA as one operation",
    },
    "training": {
        "config": "settings with their own facts, validation, presets, TOML",
        "importers": "configurations of other trainers, one package per trainer",
        "data": "datasets, captions, buckets, batches, caches, reports",
        "adapters": "which modules are trained, and the adapters on them",
        "optim": "flat parameters, AdamW in 32 and 8 bits, other libraries, schedules, EMA, loss scale",
        "execution": "how a step runs: CUDA graphs, compiled blocks, kernels",
        "memory": "activation memory on the meta device, plans within a limit, gradient checkpointing",
        "distributed": "processes, launchers, FSDP",
        "output": "adapter files and their metadata, logs, samples, signals",
        "tasks": "batches as tensors and their loss: diffusion, language; setup, objective, offload",
        "checkpoint": "the saved state of a run, and whether a run may resume from it",
        "step": "one update: micro-batches, then gradient clipping, optimizer, EMA",
        "loop": "the training loop: step, log, validate, save, sample, finish",
        "session": "a configuration to a trained file: validate, read, plan, load, attach, resume, cache, run",
    },
    "serve": {
        "gallery_names": "names of image files: the grammar of `--picture-names`",
        "s3_location": "places in an object store: s3://BUCKET/PREFIX",
        "settings": "settings of `inweave serve`",
        "jobs": "jobs as data: requests, the durable queue, result files, states, failures",
        "scheduler": "which waiting job a free device runs next",
        "engine": "what runs jobs: the dispatcher, the wire protocol, the model process and its runner",
        "cluster": "runners on the machines of a Ray cluster: endpoint, host, files by hash, their number",
        "sandbox": "untrusted files, read in a confined process: LoRA checks, images, conversions, library scans",
        "planner": "validation and memory planning of training runs, in a process of its own",
        "storage": "the gallery, datasets, uploads and training runs on disk",
        "service": "the worker without HTTP: jobs, LoRAs, models, images, gallery, training; knows the parts below",
        "http": "around every API: authentication, limits, sessions, connections, the files of the page",
        "api": "one package per API: native, a1111, openai, rbee; each with its requests and its error shape",
        "app": "the web application: routers, error handlers, security",
        "run": "the server process",
    },
}

FILES = sorted(SRC.rglob("*.py"))


def package_of(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.stem if len(relative.parts) == 1 else relative.parts[0]


def module_of(path: Path) -> str:
    name = ".".join(("inweave", *path.relative_to(SRC).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text("utf-8"))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return every imported module of a file, also inside functions and for type checkers only."""
    modules: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= set(_imported_from(node))
    return frozenset(modules)


def _imported_from(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    submodules = [name for alias in node.names if (name := f"{module}.{alias.name}") in MODULES]
    yield from submodules
    if len(submodules) < len(node.names) or module not in MODULES:  # a name of the module itself
        yield module
