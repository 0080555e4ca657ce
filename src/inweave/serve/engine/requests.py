"""The requests that a runner holds: image jobs of one model and size run in one batch, step by step; others in turn.

    submit      a request is held, and its LoRAs are read by another thread while the batch goes on
    advance     held requests join the batch, in the order of arrival; the batch makes one step
    ended       a request leaves with the step after which its images are done, or at once if it is cancelled

A request that cannot join (another size, LoRAs that can only be merged, training, ...) is overtaken by at most
``MAX_OVERTAKES`` others; then none joins until it has begun, which is when the batch is empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from inweave.errors import CancelledError, InweaveError
from inweave.generate.applied import stack_key
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Callbacks
from inweave.generate.pipeline import Pipeline
from inweave.generate.prepared import PreparedRequest
from inweave.generate.running import FULL, Member, RunningBatch
from inweave.serve.engine.contract import Cancelled, Emit, Room, RunRequest
from inweave.serve.engine.runner import LoraTable, Runner, decode_png, finish_result, progress_events, reference_images

MAX_OVERTAKES = 8
_READ_SECONDS = 0.05  # to wait for a file if there is nothing else to do


@dataclass(eq=False, slots=True)
class _Entry:
    """A request, from its arrival to its end."""

    request: RunRequest
    emit: Emit
    cancelled: Cancelled
    reading: Future[None] | None = None
    overtaken: int = 0
    tried: int = -1  # number of the batch's change since which it cannot join
    member: Member | None = None
    prepared: PreparedRequest | None = None
    prepare_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended; ``finish`` emits its images and returns its result, in any thread, or raises."""

    job: str
    finish: Callable[[], dict[str, Any]]


class Requests:
    """Runs the requests of one runner; for one thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting: list[_Entry] = []  # those that have not begun, in the order of arrival
        self._running: list[_Entry] = []
        self._batch: RunningBatch | None = None
        self._pipe: Pipeline | None = None
        self._model = ""
        self._changes = 0  # of the batch
        self._mixed = True  # whether the last request with other LoRAs could join
        self._readers = ThreadPoolExecutor(2, "inweave-read")

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    @property
    def room(self) -> Room:
        """How many requests like the running ones are taken in all, these included."""
        if not self._running or self._batch is None or any(each.overtaken >= MAX_OVERTAKES for each in self._waiting):
            return Room(1, self._mixed)
        return Room(max(1, self._batch.most), self._mixed)

    def submit(self, request: RunRequest, emit: Emit, cancelled: Cancelled) -> None:
        """Hold a request until it can begin."""
        entry = _Entry(request, emit, cancelled)
        pipe = self._runner.loaded(request.model) if request.kind != "train" else None
        if pipe is not None and request.loras:
            entry.reading = self._readers.submit(_read, pipe, [*request.loras.values()])
        self._waiting.append(entry)

    def advance(self) -> list[Ended]:
        """Do the next piece of work, usually one step; return the requests that ended with it."""
        ended = list(self._cancel())
        if not self._running:
            ended += self._begin()
        ended += self._admit()
        if self._running and self._batch is not None:
            members = self._batch.step()
            self._changes += bool(members)
            ended += [self._leave(each) for each in self._running if each.member in members]
            self._running = [each for each in self._running if each.member not in members]
        return ended

    def _cancel(self) -> Iterator[Ended]:
        for each in [each for each in self._waiting if each.cancelled()]:
            self._waiting.remove(each)
            yield _failed(each, CancelledError("cancelled before it started"))

    def _begin(self) -> list[Ended]:
        """Begin the first request, with an empty batch."""
        if not self._waiting:
            return []
        first = self._waiting[0]
        if first.reading is not None and not first.reading.done():
            wait([first.reading], _READ_SECONDS)
            return []
        self._waiting.remove(first)
        self._batch = self._pipe = None
        request = first.request
        try:
            if request.kind == "train":
                result = self._runner.run(request, first.emit, first.cancelled)
                return [Ended(request.job, lambda: result)]
            pipe = self._runner.open(request, first.emit)
            if pipe.model.family.own_pipeline or _has_passes(request) or self._prepared(first, pipe).parts:
                result = self._runner.run(request, first.emit, first.cancelled)
                return [Ended(request.job, lambda: result)]
            self._mixed |= self._model != request.model
            self._batch, self._pipe, self._model = pipe.running_batch(), pipe, request.model
            reason = self._join(first)
            assert not reason, reason
        except Exception as error:
            return [_failed(first, error)]
        return []

    def _admit(self) -> list[Ended]:
        """Let held requests join, in the order of arrival."""
        ended, before = list[Ended](), list[_Entry]()
        for each in [*self._waiting] if self._running and self._batch is not None else []:
            if any(other.overtaken >= MAX_OVERTAKES for other in before):
                break
            if each.reading is not None and not each.reading.done():
                continue
            elsewhere = each.request.model != self._model or each.request.kind == "train" or _has_passes(each.request)
            if elsewhere or each.tried == self._changes:
                before.append(each)
                continue
            try:
                reason = self._join(each)
            except Exception as error:
                self._waiting.remove(each)
                ended.append(_failed(each, error))
                continue
            if reason == FULL:
                break
            if reason:
                self._mixed &= not self._has_other_loras(each)
                each.tried = self._changes
                before.append(each)
                continue
            self._mixed |= self._has_other_loras(each)
            self._waiting.remove(each)
            for other in before:
                other.overtaken += 1
        return ended

    def _join(self, entry: _Entry) -> str:
        assert self._batch is not None and self._pipe is not None
        request = entry.request
        prepared = self._prepared(entry, self._pipe)
        if prepared.parts:
            return "its images have prompts of their own"
        if entry.member is None:
            callbacks = Callbacks(
                progress_events(entry.emit), request.preview_every, entry.cancelled, preview_first=request.preview_first
            )
            entry.member = Member(prepared, callbacks)
        if reason := self._batch.join(entry.member):
            return reason
        self._runner.open(entry.request, entry.emit)  # its adapters are in memory
        self._running.append(entry)
        self._changes += 1
        return ""

    def _has_other_loras(self, entry: _Entry) -> bool:
        """Return whether LoRAs are all that keeps a request apart from the batch."""
        member, others = entry.member, [each.member for each in self._running if each is not entry]
        if member is None:
            return False
        own = stack_key(member.request.loras)
        return any(
            each is not None and each.request.size == member.request.size and stack_key(each.request.loras) != own
            for each in others
        )

    def _prepared(self, entry: _Entry, pipe: Pipeline) -> PreparedRequest:
        """Return a request as its pipeline prepares it, once."""
        if entry.prepared is None:
            request, started = entry.request, time.perf_counter()
            entry.prepared = pipe.prepare(
                GenerateConfig(**request.config), decode_png(request.inputs.get("init")),
                decode_png(request.inputs.get("mask")), request.on_mismatch, LoraTable(request.loras),
                reference_images(request.inputs),
            )  # fmt: skip
            entry.prepare_seconds = time.perf_counter() - started
        return entry.prepared

    def _leave(self, entry: _Entry) -> Ended:
        member, pipe = entry.member, self._pipe
        assert member is not None and pipe is not None
        if member.error is not None:
            return _failed(entry, member.error)
        # the batch starts a member's clock when its LoRAs are merged
        seconds = entry.prepare_seconds + member.result.swap_seconds + time.perf_counter() - member.started
        return Ended(
            entry.request.job,
            partial(finish_result, member.result, entry.emit, pipe.model.lora_modules, seconds),
        )


def _has_passes(request: RunRequest) -> bool:
    """Return whether a request is more than one pass of the denoiser over its images."""
    return request.sheet is not None or bool(request.config.get("upscale"))


def _failed(entry: _Entry, error: Exception) -> Ended:
    def finish() -> dict[str, Any]:
        raise error

    return Ended(entry.request.job, finish)


def _read(pipe: Pipeline, files: list[str]) -> None:
    """Read LoRAs into memory; one that cannot be read is reported when its request is prepared."""
    weaver = pipe.model.weaver
    for file in files:
        with suppress(InweaveError, OSError):
            if weaver is not None:
                weaver.read_ahead(file)
