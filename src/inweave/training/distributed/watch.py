"""The other processes of a run, watched: an error or a lost machine ends all of them, with the reason.

A collective waits for the slowest process, for hours while images are encoded, and a machine that lost its power or its
network never answers. So each process has a thread that writes a number to the store of the process group every
`BEAT` seconds, and reads what the others wrote:

    error      a process that fails writes why before it ends
    silence    a number that has not changed for `SILENCE` seconds: that process, or its machine, is lost
    no store   the machine of the first process is lost

This process then has `GRACE` seconds to end by itself, as most failed collectives raise at once, and is ended. One
process of each machine prints the reason.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from inweave.errors import LostPeerError
from inweave.training.distributed.env import LOST
from inweave.training.distributed.world import World

BEAT, SILENCE, GRACE = 5.0, 180.0, 10.0  # seconds


class Watch:
    """The thread of one process, from its start to `close`; nothing in a single process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._prefix = f"inweave/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._closing = threading.Event()
        self.active = world.size > 1 and torch.distributed.is_initialized() and "MASTER_ADDR" in os.environ
        if self.active:
            threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()

    def report(self, error: BaseException) -> None:
        """Tell the others why this process ends; only the first error counts."""
        if self.active:
            text = f"rank {self._world.rank} on {socket.gethostname()}: {error or type(error).__name__}"
            try:
                store = self._store()
                if store.add(f"{self._prefix}/errors", 1) == 1:
                    store.set(f"{self._prefix}/error", text[:2000])
            except RuntimeError:
                pass  # the store is lost with the first process: this error is printed here all the same

    def lost(self, error: LostPeerError) -> LostPeerError:
        """Return the error with the reason that the process which failed first has reported, if it has."""
        try:
            reason = self._error(self._store()) if self.active else ""
        except RuntimeError:
            reason = ""
        return LostPeerError(f"another process of this run ended: {reason}") if reason else error

    def _store(self) -> Any:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=GRACE)
        return torch.distributed.TCPStore(address, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]

    def _error(self, store: Any) -> str:
        key = f"{self._prefix}/error"
        return str(store.get(key).decode("utf-8", "replace")) if store.check([key]) else ""

    def _run(self) -> None:
        reason = self._reason()
        if self._closing.wait(GRACE) or not reason:
            return
        if self._world.local_rank == 0:
            print(f"error: {reason}; continue with --resume", file=sys.stderr, flush=True)
        os._exit(LOST)  # the main thread waits inside of a library, which cannot be interrupted

    def _reason(self) -> str:
        """Watch until there is a reason to stop, and return it; empty if this process is done."""
        ranks = [rank for rank in range(self._world.size) if rank != self._world.rank]
        keys = [f"{self._prefix}/beat/{rank}" for rank in ranks]
        latest: dict[int, tuple[bytes, float]] = {rank: (b"", time.monotonic()) for rank in ranks}
        count = 0
        try:
            store = self._store()
            while not self._closing.wait(BEAT if count else 0):
                count += 1
                store.set(f"{self._prefix}/beat/{self._world.rank}", str(count))
                if error := self._error(store):
                    return f"another process of this run ended: {error}"
                now = time.monotonic()
                for rank, value in zip(ranks, store.multi_get(keys), strict=True) if store.check(keys) else ():
                    if value != latest[rank][0]:
                        latest[rank] = value, now
                silent = [rank for rank, (_, since) in latest.items() if now - since > SILENCE]
                if silent:
                    which = ", ".join(map(str, silent))
                    return f"rank {which} of this run has not answered for {SILENCE:.0f} seconds: its machine is lost"
        except RuntimeError as error:
            return f"the first process of this run does not answer: its machine is lost ({str(error)[:200]})"
        return ""
