"""The contract between the dispatcher and a runner: commands one way, reports the other way.

    dispatcher -> runner                        runner -> dispatcher
    RunnerSettings   first, and once            Ready       once, before any other report
    Load             any time after Ready       Loaded      one for each Load
    RunRequest       any time after Ready       JobEvent    any number, in the order in which they happened
    Cancel           any time after Ready       Finished    one for each RunRequest, after its last JobEvent
    Lease            any time                   Room        any time after Ready

**Jobs.** Every message about a job carries its id. Reports of several jobs may interleave; the reader routes them by
id and ignores jobs it no longer follows. A runner may hold several requests and run them in turn or together. The
result of a request never depends on the requests before it, or on those that run with it, but for the rounding of a
batch (`inweave.generate.denoise`).

**Room.** A runner that makes images of several jobs together says how many jobs like the running ones it takes in all,
these included: of the same model and `Candidate.shape`, and with the same LoRAs unless it is ``mixed``: where adding
LoRAs to the rows of a batch costs more than merging them, it is not. Until it says so, it is one job. A dispatcher
sends no more than that; a runner holds what does not fit, and begins it when it can. A job that may have killed a
runner before is sent alone, so that it takes no other with it.

**Cancel.** A cancellation asks a job to stop at its next step, and may be repeated. A job that has not begun ends
without being run; training saves a checkpoint first. Exactly one Finished follows either way: usually with the state
"cancelled", but "done" or "failed" if the job ended before the command arrived. There is no promise of time: a
dispatcher that does not want to wait any longer stops the runner.

**Residency.** Finished lists the models and adapters that the runner has in memory from then on. A dispatcher may use
it to send a job to the runner that has most of its files loaded; nothing else depends on it.

**Death.** When a runner dies, `send` and `receive` of its endpoint raise `WireError`. Its unfinished jobs belong to the
dispatcher again, which may send the same requests to another runner: images are generated from the start, training
resumes from the newest checkpoint in its output folder. A runner whose dispatcher is gone ends at once and delivers
nothing.

**Lease.** A runner on another machine cannot see its dispatcher die, and a machine that is stopped or cut off may come
back. So its host passes on for how long the dispatcher counts on it, and a runner that gets no further lease ends when
the time is over. By then the dispatcher has not given its job to another one: its own clock started later (`LEASE`).
The `receive` of such an endpoint raises `RunnerLostError`: the job is not to blame.

**Memory.** Reports may state the memory of the device at their time; those of a CPU do not.

**Data.** Fields are JSON values and bytes (`inweave.serve.engine.wire`); images travel as bytes. Only these fields are
paths, and they are paths on the machine of the runner: ``folders``, ``private``, ``parts`` of the settings, ``model``
of Load, ``model``, ``models``, ``loras``, ``upscalers`` and ``paths`` of a request, ``adapter`` in the result of a
train job, and those of Residency. The dispatcher looks them up just before it sends a request; an endpoint to a machine
with another file system translates them and moves the files (`inweave.serve.cluster`), except those of a train job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from inweave.serve.engine.wire import Message, WireError
from inweave.serve.jobs.job import Event, Failure

#: seconds without a word from the other side after which a runner on another machine and its dispatcher part
LEASE = 8.0
Emit = Callable[[Event], object]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The device of a runner, its memory budget, and the files it may open."""

    device: str | None = None
    dtype: str | None = None
    memory_bytes: int | None = None
    parts: dict[str, dict[str, str]] = field(default_factory=dict)  # model -> components from other files
    folders: tuple[str, ...] = ()  # the library: links that lead out of these folders are not followed
    private: tuple[str, ...] = ()  # other folders whose paths clients must not see
    threads: int | None = None  # of the CPU, which runners on one machine share
    quantize: str = "off"  # an argument of `inweave.pipeline`
    offload: str = "off"  # another one
    quantized_cache_gb: float = 0.0  # another one
    batch: int | Literal["auto"] = "auto"  # another one
    graph: Literal["auto", "off"] = "off"  # another one
    lora_cache_gb: float = 4.0  # another one


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model before a job needs it; ``model`` is an argument of `inweave.pipeline`."""

    model: str


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A job for a runner, with every reference resolved: ``loras`` maps each reference in ``config`` to a file."""

    job: str
    kind: str
    model: str
    config: dict[str, Any]
    loras: dict[str, str] = field(default_factory=dict)
    preview_every: int = 0
    preview_first: bool = False  # previews from the first step on, and of the last one
    on_mismatch: Literal["error", "warn"] = "error"  # warn: of a LoRA that fits in part, use that part
    inputs: dict[str, bytes] = field(default_factory=dict)  # PNG images by name: init, mask, reference-1, ...
    paths: dict[str, str] = field(default_factory=dict)  # of a train job: dataset and output
    name: str = ""  # the name that clients use for the model
    lease: str = ""  # of a train job: what `TrainingRuns.take` has written into its output folder
    upscalers: dict[str, str] = field(default_factory=dict)  # name in `config` -> its file
    models: dict[str, str] = field(default_factory=dict)  # name in `sheet` -> as `model`
    sheet: dict[str, Any] | None = None  # many images as one (`inweave.serve.engine.sheet_job`)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a job at its next step."""

    job: str


@dataclass(frozen=True, slots=True)
class Lease:
    """End at ``until`` unless another lease arrives; on the monotonic clock that all processes of a machine share."""

    until: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device with memory of its own: of tensors, held by the process for them, and all there are."""

    allocated: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The runner takes commands; ``device`` is None if the requested one does not exist."""

    device: str | None


@dataclass(frozen=True, slots=True)
class Residency:
    """The models and adapters that a runner has in memory; another runner would have to load them."""

    models: tuple[str, ...] = ()  # as in Load and RunRequest
    adapters: tuple[str, ...] = ()  # paths of requests


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model is loaded, or ``error`` says why not."""

    model: str
    error: Failure | None = None
    memory: DeviceMemory | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a running job."""

    job: str
    event: Event
    memory: DeviceMemory | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """How many jobs like the running ones a runner takes in all; ``mixed``: also with other LoRAs than theirs."""

    jobs: int
    mixed: bool = True


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a job: ``result`` if it is done, ``error`` if it failed."""

    job: str
    state: Literal["done", "failed", "cancelled"]
    result: dict[str, Any] = field(default_factory=dict)
    error: Failure | None = None
    residency: Residency = Residency()
    memory: DeviceMemory | None = None


Command = Load | RunRequest | Cancel | Lease
Report = Ready | Loaded | JobEvent | Finished | Room
_TYPES: dict[str, type[RunnerSettings | Command | Report]] = {
    "settings": RunnerSettings, "load": Load, "run": RunRequest, "cancel": Cancel, "lease": Lease,
    "ready": Ready, "loaded": Loaded, "event": JobEvent, "finished": Finished, "room": Room,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()}
_READERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _TYPES.items()}


def encode(message: RunnerSettings | Command | Report) -> Message:
    """Return a command or a report as a message of the wire."""
    return Message(_NAMES[type(message)], asdict(message))


def decode(message: Message) -> RunnerSettings | Command | Report:
    """Return the command or the report in a message; raise WireError if it is neither."""
    try:
        value: RunnerSettings | Command | Report = _READERS[message.type].validate_python(message.data)
    except (KeyError, ValidationError):
        raise WireError(f"{message.type[:50]!r} is not a message between a dispatcher and a runner") from None
    return value


class RunnerLostError(WireError):
    """The machine of a runner ended, or cannot be reached: nothing that a job did."""


class RunnerEndpoint(Protocol):
    """The dispatcher's end of the connection to a runner, whatever hosts that runner."""

    @property
    def node(self) -> str:
        """The machine of the runner; empty if it is this one."""

    @property
    def alive(self) -> bool:
        """Whether the runner was started and has not ended."""

    async def start(self, settings: RunnerSettings) -> None:
        """Start a runner with these settings, also after an earlier one has ended; its first report is Ready."""

    async def send(self, command: Command) -> None:
        """Send a command; raise WireError if the runner is gone."""

    async def receive(self) -> Report:
        """Return the next report; raise WireError if the runner is gone, RunnerLostError if its machine is."""

    async def stop(self, *, now: bool = False) -> int | None:
        """End the runner, and kill it if it does not end by itself, with ``now`` at once; return its exit code."""
