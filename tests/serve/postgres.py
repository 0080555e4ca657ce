"""A PostgreSQL server of the distribution's packages, in a temporary folder, for tests that start and stop it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

INSTALL = "no PostgreSQL server on this machine: apt-get install postgresql"
FAST = "-c fsync=off -c full_page_writes=off"  # a machine that loses power loses the tests, too


def programs() -> Path | None:
    """Return the folder of initdb and pg_ctl, the newest version first; None if they are not installed."""
    folders = [Path(path).parent for path in (shutil.which("pg_ctl"),) if path is not None]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    return next((each for each in folders if (each / "initdb").exists() and (each / "postgres").exists()), None)


class Postgres:
    """A server on a free port of 127.0.0.1; root starts it as another user, because it refuses to run as root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs = programs()
        assert self._programs is not None, INSTALL
        self._as_user: list[str] = []
        if os.getuid() == 0:
            user = next(name for name in ("postgres", "nobody") if _exists(name))
            self._as_user = ["setpriv", f"--reuid={user}", "--regid", str(pwd.getpwnam(user).pw_gid), "--clear-groups"]
            shutil.chown(folder, user)
        self._run(
            "initdb", "-D", str(folder / "data"), "-U", "inweave", "-A", "trust", "-N", "--no-locale", "-E", "UTF8"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def _run(self, program: str, *options: str) -> None:
        assert self._programs is not None
        command = [*self._as_user, str(self._programs / program), *options]
        log = self.folder / "commands.log"
        with log.open("ab") as output:
            done = subprocess.run(command, stdout=output, stderr=output, cwd=self.folder, timeout=120)
        assert done.returncode == 0, log.read_text()

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' {FAST}"
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", str(self.folder / "log"), "-o", options, "start"
        )

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def database(self, name: str) -> str:
        """Create a database and return its address."""
        address = f"postgresql://inweave@127.0.0.1:{self.port}"
        with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"{address}/{name}"


def serve_postgres() -> Iterator[Postgres]:
    """Yield a server until the tests have ended."""
    with tempfile.TemporaryDirectory(prefix="inweave-postgres-") as folder:
        Path(folder).chmod(0o755)
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop("immediate")


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
