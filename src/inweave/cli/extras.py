"""Which packages a command needs beyond reading files, and how to install them.

Reading, checking, converting and hashing adapters needs none of them.
"""

from __future__ import annotations

from importlib.util import find_spec

from inweave.cli.output import fail

#: extra of this package -> import name -> distribution
_PACKAGES = {
    "torch": {"torch": "torch"},
    "generate": {"torch": "torch", "diffusers": "diffusers", "transformers": "transformers", "PIL": "pillow"},
    "serve": {
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "sse_starlette": "sse-starlette",
        "multipart": "python-multipart",
        "prometheus_client": "prometheus-client",
        "torch": "torch",
        "diffusers": "diffusers",
        "transformers": "transformers",
        "PIL": "pillow",
    },
    "train": {"torch": "torch", "transformers": "transformers", "PIL": "pillow"},
}


def require(extra: str, as_json: bool) -> None:
    """Exit with the command that installs ``extra`` unless its packages are there."""
    missing = [name for module, name in _PACKAGES[extra].items() if find_spec(module) is None]
    if missing:
        names = ", ".join(missing[:-1]) + (" and " if missing[:-1] else "") + missing[-1]
        fail(f'this command needs {names}; install with: pip install "inweave[{extra}]"', as_json)
