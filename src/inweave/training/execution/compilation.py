"""The denoiser's repeated blocks, compiled: torch.compile traces and fuses one block, and all equal blocks share it.

    blocks     those the library lists as repeated: a UNet's transformer blocks, all blocks of a transformer
    per size   every batch size is compiled separately when it first appears; torch caches the kernels, between runs too
               (TORCHINDUCTOR_CACHE_DIR; by default torchinductor_<user> in the folder for temporary files)
    eager      validation and samples: their sizes, without gradients, would have to be compiled too
    recorded   a compiled block is recorded in a CUDA graph like any other (`inweave.training.execution.capture`)

`auto` compiles if it pays:   saved seconds > seconds of compiling

    saved      = `Family.compile_saving` (seconds per example of the model's own size) * (resolution / own size)^2
                 * examples of the run
    compiling  = COMPILE_SECONDS * number of batch sizes

Compiled kernels add up in another order, which changes rounding. So the choice belongs to the run: a resumed run keeps
it, unless the setting is "on" or "off". Blocks that cannot be compiled run eagerly, and the reason is logged.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from inweave.ops.common.select import is_nvidia
from inweave.training.adapters.targets import DENOISER
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import Order

#: seconds to compile all blocks of a denoiser for one batch size, forward and backward; on one H200: 15 to 40
COMPILE_SECONDS = 30.0
#: versions of a block that torch keeps before it gives up: kinds of blocks times batch sizes
MOST_VERSIONS = 1024


def compile_problems(networks: Mapping[str, nn.Module], config: TrainConfig, device: torch.device) -> list[str]:
    """Return why the blocks of this run cannot be compiled; empty if they can."""
    problems = []
    if DENOISER not in networks:
        problems.append("only the blocks of a denoiser that is trained are compiled, and this run trains none")
    elif not repeated_blocks(networks[DENOISER]):
        problems.append(f"{type(networks[DENOISER]).__name__} lists no repeated blocks")
    if config.shard:
        problems.append("shard: the base is gathered by hooks on the host")
    if config.offload == "blocks":
        problems.append("offload: blocks are copied by hooks on the host")
    if config.prior_prediction:
        problems.append("prior_prediction: adapters are switched off and on within a step")
    if config.qat != "off":
        problems.append(f'qat = "{config.qat}": weights are rounded by operations that are not compiled')
    if config.gradient_checkpointing == "selective":
        problems.append(
            'gradient_checkpointing = "selective" chooses among single operations, and a compiled block has none; set '
            '"off", where compiled blocks recompute cheap operations by themselves, or "full"'
        )
    return [*problems, *device_problems(device)]


def device_problems(device: torch.device) -> list[str]:
    """Return what torch.compile lacks for this device."""
    if not is_nvidia(device):
        return [f"device {device}: blocks are compiled for NVIDIA GPUs"]
    problems = []
    if (capability := torch.cuda.get_device_capability(device)) < (7, 0):
        problems.append(f"compute capability {capability[0]}.{capability[1]}: Triton needs 7.0 or more")
    if find_spec("triton") is None:
        problems.append("Triton is not installed")
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang", "cc"])):
        missing = f"CC={compiler} does not exist" if compiler else "none was found"
        problems.append(f"Triton needs a C compiler, and {missing}; install gcc")
    return problems


def saves_time(model: Any, order: Order, config: TrainConfig, steps: int) -> bool:
    """Return whether compiling saves a run of ``steps`` more time than it takes; not for a model without a family."""
    family = getattr(model, "family", None)
    if family is None:
        return False
    share = ((config.side or model.size) / model.size) ** 2
    examples = steps * config.gradient_accumulation * config.batch_size
    return bool(family.compile_saving * share * examples > COMPILE_SECONDS * len(order.sizes))


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks diffusers lists as repeated, else those it never splits over devices (Stable Diffusion 3)."""
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    # a fused block (`inweave.models.fused.blocks`) is a subclass of the one that is listed
    return [module for module in network.modules() if any(kind.__name__ in names for kind in type(module).__mro__)]


def inductor_options(*, deterministic: bool) -> dict[str, Any]:
    """Let Inductor also generate reductions that hold a whole row, and use the faster kernel of the two.

    By default Inductor holds rows of up to 1,024 numbers and reads longer ones twice, which makes the layer norms of
    transformers 1.6 times as slow. In deterministic runs nothing is timed: the chosen order of a sum would differ from
    run to run.

    Kernels that Inductor's static launcher loads from its cache lack the lock that this timing needs, so that a second
    run failed to compile (torch 2.11 to 2.13); Triton's launcher loads them anew. A recorded step launches nothing
    anyway.
    """
    return {"deterministic": True} if deterministic else {"triton.multi_kernel": 1, "use_static_cuda_launcher": False}


class CompiledBlocks:
    """The blocks of one run; eager until `start`. ``backend``: of torch.compile; ``deterministic``: no timing."""

    def __init__(
        self, networks: Mapping[str, nn.Module], backend: str = "inductor", *, deterministic: bool = False
    ) -> None:
        self.blocks = repeated_blocks(networks[DENOISER]) if DENOISER in networks else []
        self.active = False
        self.compiling = False  # during the first step of a size: an error may come from the compiler
        self.problem: str | None = None  # why compiling was given up
        self.seconds = 0.0  # spent on first steps of a size
        self._backend = backend
        self._deterministic = deterministic
        self._calls: list[Callable[..., Any] | None] = []
        self._sizes: set[Hashable] = set()
        self._events: list[dict[str, Any]] = []

    def start(self) -> None:
        """Compile the blocks when they are next called."""
        options = inductor_options(deterministic=self._deterministic) if self._backend == "inductor" else None
        for block in self.blocks:
            block.compile(backend=self._backend, dynamic=False, options=options)
        self._calls = [block._compiled_call_impl for block in self.blocks]
        self.active = True

    def stop(self, problem: str) -> None:
        """Run eagerly from now on."""
        self._set([None] * len(self.blocks))
        self.active = self.compiling = False
        self.problem = " ".join(problem.split())[:300]
        text = f"the blocks cannot be compiled and run eagerly: {self.problem}"
        self._events.append({"event": "compile failed", "text": text})

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the blocks eagerly inside the context."""
        self._set([None] * len(self._calls))
        try:
            yield
        finally:
            if self.active:
                self._set(self._calls)

    @contextmanager
    def call(self, size: Hashable) -> Iterator[None]:
        """Enter a step on a batch of this size: the first step of a size compiles."""
        if not self.active:
            yield
            return
        import torch._dynamo.config as limits

        start = time.perf_counter()
        self.compiling = size not in self._sizes
        with limits.patch(recompile_limit=MOST_VERSIONS, accumulated_recompile_limit=MOST_VERSIONS):
            yield
        if self.compiling:
            self.compiling = False
            self._sizes.add(size)
            seconds = time.perf_counter() - start
            self.seconds += seconds
            text = f"{len(self.blocks)} blocks were compiled for a batch size; its first step took {seconds:.1f} s"
            self._events.append({"event": "compile", "text": text})

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events that were not logged yet."""
        events, self._events = self._events, []
        return events

    def _set(self, calls: list[Callable[..., Any] | None]) -> None:
        for block, call in zip(self.blocks, calls, strict=False):  # nothing to set before `start`
            block._compiled_call_impl = call


def choose(setting: str, problems: Sequence[str], *, saves: bool, before: bool | None) -> tuple[bool, list[str]]:
    """Return (whether to compile, notes for the log); ``before``: the choice of the run that is resumed."""
    preferred = {"off": False, "on": True}.get(setting, saves if before is None else before)
    chosen = preferred and not problems
    if before is None or chosen == before:
        return chosen, []
    was, now = ("compiled", "eager") if before else ("eager", "compiled")
    reason = f" ({'; '.join(problems)})" if preferred and problems else ""
    return chosen, [f"the blocks were {was} and are {now} now{reason}: results differ from a straight run by rounding"]
