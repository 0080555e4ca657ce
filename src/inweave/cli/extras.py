"""Which packages a command needs beyond reading files, and how to install them.

Reading, checking, converting and hashing adapters needs none of them.
"""

from __future__ import annotations

from importlib.util import find_spec

from inweave.cli.console import fail

_MODELS = {
    "torch": "torch", "diffusers": "diffusers", "transformers": "transformers", "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub", "PIL": "pillow",
}  # fmt: skip
_SERVER = {
    "fastapi": "fastapi", "uvicorn": "uvicorn", "sse_starlette": "sse-starlette", "multipart": "python-multipart",
    "prometheus_client": "prometheus-client",
}  # fmt: skip
#: extra of this package -> import name -> distribution: everything that its commands import without extra settings
PACKAGES = {
    "torch": {"torch": "torch"},
    "generate": _MODELS,
    "train": _MODELS,
    "serve": {**_SERVER, **_MODELS},
    "postgresql": {"psycopg": "psycopg"},
    "cluster": {"ray": "ray"},
    "s3": {"boto3": "boto3"},
}


def require(extra: str, as_json: bool) -> None:
    """Exit with the command that installs ``extra`` unless its packages are there."""
    missing = [name for module, name in PACKAGES[extra].items() if not _is_installed(module)]
    if missing:
        names = ", ".join(missing[:-1]) + (" and " if missing[:-1] else "") + missing[-1]
        fail(f'this command needs {names}; install with: pip install "inweave[{extra}]"', as_json)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a broken installation
        return False
