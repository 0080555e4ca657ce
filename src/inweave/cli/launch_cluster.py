"""The processes of one run on a Ray cluster: an actor for each, which runs what `inweave.cli.launch` would start.

    placement   one GPU each, or one CPU if the cluster has no GPUs; on as few machines as possible
    rank        in the order of machines; the first actor's machine has the store of the process group
    output      of rank 0 as it comes, of another one if it failed first
    lost        an actor, its machine, or its process by a signal: the others are ended, and the run continues from its
                last checkpoint, at most `restarts` times; an error of the run itself is not tried again

The working directory, and so every relative path, is that of the command: all machines need the same folders.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from inweave.cli.console import fail
from inweave.cli.launch import GRACE, free_port
from inweave.files.paths import printable
from inweave.files.writing import write_text

if TYPE_CHECKING:
    from inweave.training.config.schema import TrainConfig

#: seconds to wait for devices: those of a lost machine may come back, and an autoscaler starts machines
PATIENCE = 600.0
#: the address that starts a cluster on this machine
_LOCAL = "local"


def launch_cluster(address: str, processes: int, config: TrainConfig, as_json: bool, restarts: int) -> int:
    """Run all processes; return 0 if all succeeded, else the exit code of the first that failed."""
    from inweave.training.distributed.env import LOST

    ray = connect(address)
    try:
        for attempt in range(restarts + 1):
            try:
                lost, code = _Attempt(ray, processes, config, as_json).wait()
            except ray.exceptions.RayError as error:  # an actor that did not start, for instance without the package
                lost, code = f"Ray: {str(error).strip().splitlines()[-1]}", LOST
            if not lost:
                return code
            if attempt < restarts:
                typer.echo(f"note: {lost}; restart {attempt + 1} of {restarts} from the last checkpoint", err=True)
                if config.resume == "never":
                    config = config.model_copy(update={"resume": "auto"})
        fail(f"{lost}; continue with --resume", as_json, LOST)
    finally:
        ray.shutdown()


def connect(address: str) -> Any:
    """Connect to a cluster ("auto": this machine's; "local": a new one) and return the module `ray`."""
    from inweave.errors import ConfigError

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    loopback = address == _LOCAL or address.split(":")[0] in ("127.0.0.1", "localhost")
    if loopback:  # nodes that other machines cannot reach
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    options: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if loopback else {}
    options |= {"address": address, **({"include_dashboard": False} if address == _LOCAL else {})}
    try:
        ray.init(logging_level="ERROR", log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: cannot connect to a Ray cluster: {error}") from None
    return ray


class Member:
    """An actor: one process of the run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def facts(self) -> tuple[str, str, list[str], int]:
        """Return the machine's id and address, the GPUs reserved for this actor and a free port."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(each) for each in ray.get_gpu_ids()]
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus, free_port()

    def run(
        self, configuration: str, as_json: bool, folder: str, variables: dict[str, str]
    ) -> Iterator[tuple[str, Any]]:
        """Run the process; yield ("out" | "err", a line) as they come and ("code", its exit code) at the end."""
        if not Path(folder).is_dir():
            yield "err", f"error: {socket.gethostname()} has no folder {folder}; all machines need the same folders"
            yield "code", 2
            return
        lines: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="inweave-train-") as own:
            file = Path(own) / "train.toml"
            write_text(file, configuration)
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inweave", "train", str(file), *(["--json"] if as_json else [])],
                cwd=folder, env={**os.environ, "PYTHONSAFEPATH": "1", **variables}, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_end_with_parent(),
            )  # fmt: skip
            readers = [
                threading.Thread(target=_read, args=(stream, kind, lines), daemon=True)
                for kind, stream in (("out", process.stdout), ("err", process.stderr))
            ]
            try:
                for reader in readers:
                    reader.start()
                for _ in readers:
                    for line in iter(lines.get, ("end", None)):  # noqa: UP028 (Ray asks for a plain generator)
                        yield line
                yield "code", process.wait()
            finally:
                process.kill()

    def stop(self) -> None:
        """Ask the process to save and stop; Ray blocks SIGINT in its processes, and in those that they start."""
        if self._process is not None:
            self._process.terminate()


def _read(stream: IO[bytes], kind: str, lines: queue.SimpleQueue[tuple[str, Any]]) -> None:
    for line in stream:
        lines.put((kind, line.decode("utf-8", "replace").rstrip("\r\n")))
    lines.put(("end", None))


def _end_with_parent() -> Callable[[], object] | None:
    """Return what a child runs to be killed when its parent ends, however that happens; on Linux only."""
    import ctypes

    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, 1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


class _Attempt:
    """The actors of a run, from their start until all of them have ended."""

    def __init__(self, ray: Any, processes: int, config: TrainConfig, as_json: bool) -> None:
        self._ray, self._config, self._as_json = ray, config, as_json
        self._output: list[list[tuple[str, str]]] = [[] for _ in range(processes)]
        self._codes: dict[int, int] = {}
        self._lost: list[tuple[int, str]] = []  # rank, Ray's name for the error
        gpus = config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        if not gpus and config.device in (None, "auto"):
            self._config = config.model_copy(update={"device": "cpu"})
        self._members: list[Any] = []
        self._nodes: list[str] = []  # addresses, by rank
        self._group = self._reserve("GPU" if gpus else "CPU", processes)
        try:
            self._members, self._streams = self._start(gpus, processes)
        except BaseException:
            self._end()
            raise

    def _reserve(self, kind: str, processes: int) -> Any:
        from ray.util import placement_group, remove_placement_group

        from inweave.errors import ConfigError

        group = placement_group([{kind: 1}] * processes, strategy="PACK")
        if not group.wait(5):
            has = self._ray.cluster_resources().get(kind, 0)
            typer.echo(f"note: waiting for {processes} {kind}s; the cluster has {has:g}", err=True)
            if not group.wait(PATIENCE):
                remove_placement_group(group)
                raise ConfigError(
                    f"--gpus {processes}: the cluster had no {processes} {kind}s free within {PATIENCE:.0f} s; it "
                    f"has {has:g}"
                )
        return group

    def _start(self, gpus: bool, processes: int) -> tuple[list[Any], dict[Any, int]]:
        """Start the actors, and the run in each of them; return (actors by rank, output -> rank)."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        device = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}
        actor = self._ray.remote(Member)
        members = self._members = [
            actor.options(
                **device, max_restarts=0, max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(processes)
        ]  # fmt: skip
        facts = self._ray.get([each.facts.remote() for each in members], timeout=PATIENCE)
        nodes = list(dict.fromkeys(node for node, *_ in facts))
        order = sorted(range(processes), key=lambda index: nodes.index(facts[index][0]))
        members, facts = [members[index] for index in order], [facts[index] for index in order]
        self._nodes = [address for _, address, *_ in facts]
        streams = {}
        for rank, (member, (node, *_)) in enumerate(zip(members, facts, strict=True)):
            local = [index for index, (each, *_) in enumerate(facts) if each == node]
            variables = {
                "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": local.index(rank), "LOCAL_WORLD_SIZE": len(local),
                "MASTER_ADDR": facts[0][1], "MASTER_PORT": facts[0][3],
            }  # fmt: skip
            if gpus:  # all of the run on this machine: each takes the one of its local rank
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for index in local for gpu in facts[index][2])
            texts = {name: str(value) for name, value in variables.items()}
            stream = member.run.options(num_returns="streaming").remote(
                self._config.to_toml(), self._as_json, str(Path.cwd()), texts
            )
            streams[stream] = rank
        return members, streams

    def wait(self) -> tuple[str, int]:
        """Wait for the end; return (what was lost, if the run can continue without it; the exit code)."""
        with _forwarded(self._stop):
            try:
                self._read_streams()
            finally:
                self._end()
        from inweave.training.distributed.env import LOST

        failed = [rank for rank, code in self._codes.items() if code]
        killed = [rank for rank in failed if self._codes[rank] < 0]
        culprits = [rank for rank in failed if self._codes[rank] not in (LOST, 130) and rank not in killed]
        if culprits:
            self._print(culprits[0])
            return "", self._codes[culprits[0]]
        lost = [*self._lost, *((rank, f"killed by signal {-self._codes[rank]}") for rank in killed)]
        lost = lost or [(rank, "it lost another process") for rank in failed if self._codes[rank] == LOST]
        for rank, reason in lost[:1]:
            return f"rank {rank} on {self._nodes[rank]} was lost ({reason})", LOST
        self._print(0)  # as JSON, of which the attempts before would be another document
        return "", next((code for code in self._codes.values() if code), 0)

    def _read_streams(self) -> None:
        streams, deadline = dict(self._streams), float("inf")
        while streams and time.monotonic() < deadline:
            ready, _ = self._ray.wait(list(streams), num_returns=1, timeout=0.5)
            for stream in ready:
                rank = streams[stream]
                try:
                    kind, value = self._ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except self._ray.exceptions.RayError as error:
                    del streams[stream]
                    self._lost.append((rank, type(error).__name__))
                    deadline = min(deadline, time.monotonic() + 2 * GRACE)
                    continue
                if kind == "code":
                    self._codes[rank] = value
                    if value:
                        deadline = min(deadline, time.monotonic() + 2 * GRACE)
                elif rank == 0 and not (self._as_json and kind == "out"):
                    typer.echo(printable(value), err=kind == "err")
                else:
                    self._output[rank] = [*self._output[rank][-200 if rank else 0 :], (kind, value)]

    def _print(self, rank: int) -> None:
        for kind, line in self._output[rank]:
            typer.echo(printable(line), err=kind == "err")

    def _stop(self) -> None:
        for member in self._members:
            member.stop.remote()

    def _end(self) -> None:
        from ray.util import remove_placement_group

        for member in self._members:
            self._ray.kill(member)
        remove_placement_group(self._group)


@contextlib.contextmanager
def _forwarded(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` for Ctrl-C and the like."""
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
