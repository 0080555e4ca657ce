"""Kernels in Triton's interpreter, in a separate process: Triton decides on import how kernels run.

    -> tests.unit.ops.test_merge         <- {"value": the result of its `interpreted`} or {"error": the traceback}

One process serves all modules, since importing torch takes longer than most kernels.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from typing import IO, Any

import pytest


def run_interpreted(module: str) -> Any:
    """Return the result of ``module.interpreted()`` in the interpreter, after a round trip through JSON."""
    pytest.importorskip("triton")
    process, errors = _process()
    assert process.stdin is not None and process.stdout is not None
    print(module, file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        _process.cache_clear()
        errors.seek(0)
        raise AssertionError(f"{module}: the process ended with {process.wait()}: {errors.read()[-3000:]}")
    answer = json.loads(line)
    assert "error" not in answer, answer["error"]
    return answer["value"]


@cache
def _process() -> tuple[subprocess.Popen[str], IO[str]]:
    """Return the process; it ends when this one ends and closes its standard input."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
    command = [sys.executable, "-c", "from tests.unit.ops.interpreter import serve; serve()"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    return process, errors


def serve() -> None:
    """Answer one module per line of standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = {"value": importlib.import_module(line.strip()).interpreted()}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
