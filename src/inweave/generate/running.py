"""A batch that requests of one size join and leave between two steps of the denoiser.

    batch.join(member)      "", or why the member cannot join now; its LoRAs become part of the batch
    batch.step()            one step for every image; returns the members that have ended with it

Every image has its own sampler, steps and seed (`sampling`), so images at different steps share a call. Of one member's
images, as many are in the batch as there is room for; the member with the fewest gets the next free place.

LoRAs are merged where all members have them and added to the rows of the others, as `groups` decides: a member whose
LoRAs can only be merged, or whose adding costs more than it saves, cannot join. When the members that are left have one
stack, it is merged. An image that changes from merged to added LoRAs goes on with the unmerged product's rounding; that
of a member alone is bit for bit what a call of the pipeline gives.

Every text of a member is encoded when it joins, with its LoRAs in the encoders.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import torch

from inweave.errors import CancelledError, RequestError
from inweave.generate.applied import AppliedLora, stack_key
from inweave.generate.batches import Batch, largest_batch, most_images
from inweave.generate.conditioning import Added, BatchConditioning, PromptConditioning
from inweave.generate.denoise import Callbacks, Pace, Progress, decode_image, evaluate, is_preview_due
from inweave.generate.drawing import Job, OnImage, add_image, warnings_of
from inweave.generate.groups import Group, added_in_slots, groups_of, probe_rows
from inweave.generate.latents import decode
from inweave.generate.prepared import PreparedRequest, tasks_of
from inweave.generate.result import Result
from inweave.generate.sampling import ImageTask, Sampling
from inweave.models.model import Model

Merge = Callable[[Sequence[AppliedLora]], object]
Condition = Callable[[PreparedRequest, Added], PromptConditioning]
FULL = "the batch is full"


@dataclass(eq=False, slots=True)
class Member:
    """A request in a batch; ``error``: why it ended without all of its images."""

    request: PreparedRequest
    callbacks: Callbacks = field(default_factory=Callbacks)
    on_image: OnImage | None = None
    error: Exception | None = None
    job: Job = field(init=False)
    conditioning: PromptConditioning = field(init=False)
    waiting: deque[ImageTask | Sampling] = field(default_factory=deque)
    samplings: list[Sampling] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # id of a sampling -> number of its image
    started: float = 0.0
    most: int = 1  # images of its largest batch

    def __post_init__(self) -> None:
        self.job = Job(self.request, Result([], [], self.request.loras), 0)

    @property
    def result(self) -> Result:
        """What was made so far."""
        return self.job.result

    def warn(self, text: str) -> None:
        """Add a warning to the result, once."""
        if text not in self.result.warnings:
            self.result.warnings.append(text)


class RunningBatch:
    """Images of one model and size; nothing else may use the model between its first and its last member.

    Args:
        model: what makes the images.
        model_hash: of its file, for records.
        batch: how many images are made together, at most.
        measured: see `largest_batch`.
        merge: makes the weights those of a stack.
        condition: encodes the prompts of a request with LoRAs that are added.
    """

    def __init__(
        self,
        model: Model,
        model_hash: str | None,
        batch: Batch,
        measured: dict[tuple[object, ...], int],
        merge: Merge,
        condition: Condition,
    ) -> None:
        self.model, self.members = model, list[Member]()
        self.most = 1
        self._hash, self._batch, self._measured = model_hash, batch, measured
        self._merge, self._condition = merge, condition
        self._merged: tuple[object, ...] | None = None
        self._mixed = False
        self._composed: list[Sampling] = []
        self._conditioning: BatchConditioning | None = None
        self._acting = ExitStack()
        self._pace = Pace(model.device)

    # joining

    @torch.no_grad()
    def join(self, member: Member) -> str:
        """Take a member in; return why it cannot join now, and "" if it did.

        Raises:
            InweaveError: its request cannot be made at all.
        """
        others, request = [*self.members], member.request
        if others and request.size != others[0].request.size:
            return "images of another size are being made"
        if len(others) >= self.most and others:
            return FULL
        started = time.perf_counter()
        self._acting.close()
        self._composed = []
        group, reason = self._group([*others, member])
        if group is None:
            return reason
        try:
            while True:
                added = self._settle(group, [*others, member])
                member.conditioning = self._condition(request, added[-1])
                tasks = tasks_of(request, member.conditioning)
                first = Sampling(self.model, tasks[:1])
                for step in range(first.steps):
                    member.conditioning.at(step, first.steps)
                if member.conditioning.complete:
                    break
                group, reason = self._group([*others, member])
                if group is None:
                    self._restore(others)
                    return reason
        except BaseException:
            self._restore(others)
            raise
        member.started, result = time.perf_counter(), member.result
        result.swap_seconds, result.merge_reason = member.started - started, group.merge_reason
        result.warnings += warnings_of(self.model, request)
        member.waiting = deque([first, *tasks[1:]])
        if not others:
            self.most = largest_batch(
                self.model, tasks[:1] * max(2, most_images(self.model, request.size)), self._batch, self._measured
            )
        self.members.append(member)
        return ""

    def _group(self, members: Sequence[Member]) -> tuple[Group | None, str]:
        """Return how members share a batch; None if they cannot, and why."""
        jobs = [each.job for each in members]
        while True:
            groups = groups_of(self.model, jobs, self._batch, attrgetter("size"))
            if len(groups) > 1:
                return None, next((each.merge_reason for each in reversed(groups) if each.merge_reason), "")
            group, request = groups[0], members[-1].request
            if not any(group.added) or not probe_rows(self.model, partial(self._condition, request, ()), request):
                return group, ""
            # the layers of the denoiser that do not see rows are known now

    def _settle(self, group: Group, members: Sequence[Member]) -> list[Added]:
        """Make weights and slots those of a group; return what is added to each member."""
        self._acting.close()
        self._composed = []
        if (key := stack_key(group.merged)) != self._merged:
            self._merged = None
            self._merge(group.merged)
            self._merged = key
        added = added_in_slots(self.model, group)
        by_job = {id(job): number for number, job in enumerate(group.jobs)}
        added = [added[by_job[id(each.job)]] for each in members]
        self._mixed = any(added)
        for each, own, loras in zip(members, added, group.added, strict=True):
            if hasattr(each, "conditioning"):
                each.conditioning.added = own
            names = [lora.name for lora in loras]
            each.result.added += [name for name in names if name not in each.result.added]
        return added

    def _restore(self, members: Sequence[Member]) -> None:
        """Make weights and slots those of these members again; one that fails then ends with the error."""
        if not members:
            return
        try:
            group, reason = self._group(members)
            assert group is not None, reason
            self._settle(group, members)
        except Exception as error:
            for each in members:
                each.error = error

    # running

    @torch.no_grad()
    def step(self) -> list[Member]:
        """Make a step of every image; return the members that have ended, after removing them."""
        for member in self.members:
            if member.callbacks.cancelled is not None and member.callbacks.cancelled():
                member.error = CancelledError("cancelled")
        self._fill()
        samplings = self._active()
        if samplings:
            for member in self.members:
                member.most = max(member.most, len(samplings)) if member.samplings else member.most
            with self.model.using(self.model.blueprint.denoiser.folder):
                self._evaluate(samplings)
            self._pace.wait()
        for member in self.members:
            if member.error is None and member.samplings:
                self._guard(member, self._report)
        for member in self.members:
            for sampling in [each for each in member.samplings if each.done]:
                if member.error is None:
                    self._guard(member, partial(self._finish, sampling))
        ended = [each for each in self.members if each.error or not (each.waiting or each.samplings)]
        if ended:
            self.members = [each for each in self.members if each not in ended]
            self._left()
        for each in ended:
            each.result.warnings = list(dict.fromkeys([*each.result.warnings, *each.conditioning.warnings]))
        return ended

    def close(self) -> None:
        """Drop all members."""
        self.members = []
        self._left()

    def _left(self) -> None:
        """Stop adding what no member needs; merge the stack of the members that are left, if it is one."""
        self._acting.close()
        self._composed, self._conditioning = [], None
        if self._mixed and self.members and len({stack_key(each.request.loras) for each in self.members}) == 1:
            self._restore(self.members)

    def _active(self) -> list[Sampling]:
        return [each for member in self.members if member.error is None for each in member.samplings if not each.done]

    def _fill(self) -> None:
        """Give free places to the members that have the fewest."""
        while sum(len(each.samplings) for each in self.members) < self.most:
            waiting = [each for each in self.members if each.waiting and each.error is None]
            if not waiting:
                return
            self._guard(min(waiting, key=lambda each: len(each.samplings)), self._begin)

    def _begin(self, member: Member) -> None:
        task = member.waiting.popleft()
        sampling = task if isinstance(task, Sampling) else Sampling(self.model, [task])
        member.numbers[id(sampling)] = member.request.config.count - len(member.waiting) - 1
        member.samplings.append(sampling)

    def _guard(self, member: Member, work: Callable[[Member], None]) -> None:
        """Do something for one member; what it raises ends that member alone."""
        try:
            work(member)
        except Exception as error:
            member.error = error

    def _evaluate(self, samplings: list[Sampling]) -> None:
        """Call the denoiser for these images; if that fails, for halves of them, so that only what fails alone ends."""
        before = [each.evaluation for each in samplings]
        failure: Exception
        try:
            evaluate(self.model, samplings, self._compose(samplings))
            return
        except Exception as error:
            if len(samplings) == 1:
                self._member_of(samplings[0]).error = error
                return
            memory, failure = isinstance(error, torch.OutOfMemoryError), error
        del failure  # outside of the handler: the error holds its frames, and they hold what was computed
        self._acting.close()
        self._composed = []
        half = -(-len(samplings) // 2)
        if memory:
            self.most = min(self.most, half)
            if self.model.recorded is not None:
                self.model.recorded.clear()
            torch.cuda.empty_cache()
            for each in samplings:
                self._member_of(each).warn(f"not enough memory for {len(samplings)} images together; fewer are now")
        rest = [each for each, at in zip(samplings, before, strict=True) if each.evaluation == at]
        half = -(-len(rest) // 2)
        for part in (rest[:half], rest[half:]):
            if part:
                self._evaluate(part)

    def _member_of(self, sampling: Sampling) -> Member:
        return next(each for each in self.members if sampling in each.samplings)

    def _compose(self, samplings: list[Sampling]) -> BatchConditioning:
        """Return the conditioning of these images, with their adapters acting; kept while the images are the same."""
        if self._conditioning is None or list(map(id, samplings)) != list(map(id, self._composed)):
            self._acting.close()
            size = self.members[0].request.size
            images = [each.tasks[0].conditioning for each in samplings]
            self._conditioning = BatchConditioning(self.model, images, self.model.latent_space.shape(*size))
            self._composed = samplings
            self._acting.enter_context(self._conditioning.acting())
            recorded = self.model.recorded
            if recorded is not None and (problem := recorded.new_problem()):
                for each in self.members:
                    each.warn(f"steps are not recorded in a CUDA graph, which would be faster: {problem}")
        return self._conditioning

    def _finish(self, sampling: Sampling, member: Member) -> None:
        """Add an image whose last step is done to its result."""
        member.samplings.remove(sampling)
        number, task = member.numbers.pop(id(sampling)), sampling.tasks[0]
        try:
            image = decode_image(self.model, sampling.latents, task, replace(member.callbacks, warn=member.warn))
        except RequestError as error:
            member.error = member.result.error = error
            return
        add_image(self.model, self._hash, member.job, task, image, member.most)
        if member.on_image is not None:
            member.on_image(number, member.result.images[-1], member.result.records[-1])

    def _report(self, member: Member) -> None:
        """Report the steps of a member; one preview for each of its images where one is due."""
        callbacks = member.callbacks
        if callbacks.progress is None:
            return
        total, count = member.samplings[0].steps, member.request.config.count
        ended = len(member.result.images)
        steps = {id(each): (each.evaluation - 1) // each.order + 1 for each in member.samplings if each.evaluation}
        done = (ended * total + sum(steps.values()), count * total)
        left = (time.perf_counter() - member.started) / max(done[0], 1) * (done[1] - done[0])
        if not steps:
            return
        first = min(member.numbers[each] for each in steps)
        own = Progress(max(steps.values()), total, left, first, count, None, len(steps), ended, done)
        previews = [each for each in member.samplings if is_preview_due(callbacks, steps.get(id(each), 0), total)]
        if not previews:
            callbacks.progress(own)
        for each in previews:
            image = decode(self.model, each.latents, member.warn, preview=True)
            callbacks.progress(replace(own, image=member.numbers[id(each)], preview=image))
