"""`inweave` in this process: a separate process would cost half a second of imports per test."""

from __future__ import annotations

import subprocess

from typer.testing import CliRunner

from inweave.cli.app import app


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command; return exit code, standard output and standard error like a process. Exceptions fail the test."""
    command = list(map(str, arguments))
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"inweave {' '.join(command)}: a traceback") from result.exception
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)
