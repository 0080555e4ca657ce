"""Requests with different LoRAs: which are drawn together, with some LoRAs merged and the others added row by row.

    merged by itself    the weights become those of the stack, one stack after the other; see `inweave.weights.weaver`
    added               LoRAs that all requests of a group have are merged, and the others are added to the rows of
                        each image, in one batch; see `inweave.weights.row_adapters`

A LoRA that cannot be added (DoRA, OFT, whole differences, quantized weights, ...) is merged, so requests share a group
if they have the same of these. They share its batches if size, sampler and steps are the same.

`batch = "auto"` adds if that costs less. In units of the work of one row of the denoiser, per step:

    merged    sum over stacks and their batches of   F + rows
    added     sum over batches of                    1.3 F + rows (1 + a + e)   e: of rows that get products

    F    the cost of a call, whatever its rows: C / latents of an image. C is 170 on a CPU (measured: the embedded model
         takes 47 ms for one image of 256 latents, 132 ms for four) and 80,000 on a GPU
    a    multiply-adds of the added products, as a share of those of the weights: sum r (in + out) / sum in out
    e    the passes over the outputs of layers: 0.5 on a CPU (measured: 26 ms for an image of the embedded model, where
         the network itself takes 48), nothing on a GPU, where the kernels are short of memory traffic otherwise

A swap costs less than a step, and is left out. A number of images says how many are made together, whatever they cost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch

from inweave.adapter.components import FOLDERS
from inweave.generate.applied import AppliedLora, stack_key, strength_of
from inweave.generate.batches import Batch, most_images, split
from inweave.generate.conditioning import Added, PromptConditioning, network_errors
from inweave.generate.denoise import run_denoiser
from inweave.generate.drawing import Drawing, Job
from inweave.generate.prepared import PreparedRequest
from inweave.models.families.conditioning import join
from inweave.models.model import Model
from inweave.targets.plan import Plan
from inweave.weights.row_adapters import MOST_SLOTS

_CALL = {"cpu": 170.0, "cuda": 80_000.0}  # latents whose work costs as much as a call
_ADDED_PASSES = {"cpu": 0.5}  # of a row's work
_ADDED_CALL = 1.3  # of a call that adds to the outputs of its layers

Key = tuple[object, ...]


@dataclass(slots=True)
class Group:
    """Requests that are drawn with the same LoRAs merged, and what is added to the images of each.

    ``merge_reason``: why their common stack is merged by itself, though there are requests with others.
    """

    jobs: list[Job]
    merged: list[AppliedLora]
    added: list[list[AppliedLora]] = field(default_factory=list)
    merge_reason: str = ""


def groups_of(
    model: Model, jobs: Sequence[Job], batch: Batch,
    shared: Callable[[PreparedRequest], object] = attrgetter("shared"),
) -> list[Group]:  # fmt: skip
    """Return the groups in which requests are drawn; ``shared``: what those of a group with several stacks share."""
    stacks = _by(jobs, lambda job: stack_key(job.request.loras))
    if len(stacks) == 1:
        return [_merged(jobs)]
    if reason := _model_obstacle(model, batch):
        return [_merged(own, reason) for own in stacks.values()]
    fixed = {key: _fixed(model, own[0].request.loras) for key, own in stacks.items()}
    groups, rest = list[Group](), dict[Key, tuple[list[Job], str]]()
    for every in _by(
        jobs, lambda job: (tuple(sorted(fixed[stack_key(job.request.loras)])), shared(job.request))
    ).values():
        for part in _limited(every):
            reason = _reason_to_merge(model, part, fixed, batch)
            if not reason:
                groups.append(_mixed(part))
                continue
            for job in part:
                rest.setdefault(stack_key(job.request.loras), ([], reason))[0].append(job)
    return [*groups, *(_merged(own, reason) for own, reason in rest.values())]


def _model_obstacle(model: Model, batch: Batch) -> str:
    """Return why no LoRA is added to rows of this model's batches; "" if some may be."""
    if model.family.own_pipeline:
        return "its own pipeline makes one image after the other"
    if model.offloader is not None:
        return "weights in host memory are merged there"
    return "images are made one by one" if batch == 1 else ""


def _fixed(model: Model, loras: Sequence[AppliedLora]) -> dict[Key, str]:
    """Return the LoRAs of a stack that can only be merged, with the reason."""
    return {
        lora_key(lora): f"LoRA {lora.name}: {reason}"
        for lora in loras
        if (reason := model.row_adapters.obstacle(plan_of(model, lora)))
    }


def _reason_to_merge(model: Model, jobs: Sequence[Job], fixed: dict[Key, dict[Key, str]], batch: Batch) -> str:
    """Return why requests that might share batches are drawn by stacks; "" if they are mixed."""
    stacks = _by(jobs, lambda job: stack_key(job.request.loras))
    if len(stacks) == 1:
        own = next(iter(fixed[next(iter(stacks))].values()), "")
        many = len(set(map(_slot_key, jobs[0].request.loras))) > MOST_SLOTS
        most = f"it has more than {MOST_SLOTS} LoRAs" if many else ""
        return own or most or "no other request has its size, sampler and steps"
    added = _mixed(jobs).added
    if batch != "auto":
        return ""
    merged_cost, added_cost = _costs(model, jobs, list(stacks.values()), added)
    return "" if added_cost < merged_cost else "merging each stack costs less than adding it to the rows of a batch"


def _costs(
    model: Model, jobs: Sequence[Job], stacks: Sequence[Sequence[Job]], added: Sequence[Sequence[AppliedLora]]
) -> tuple[float, float]:
    """Return the cost of a step merged, and added; see the formula above."""
    request = jobs[0].request
    _, _, height, width = model.latent_space.shape(*request.size)
    call = _CALL.get(model.device.type, 0.0) / (height * width)
    most = most_images(model, request.size)
    rows = [_rows(model, job) for job in jobs]
    shares = [sum(_share(model, lora) for lora in each) for each in added]
    counts = [job.request.config.count for job in jobs]
    work = sum(each * count for each, count in zip(rows, counts, strict=True))
    extra = sum(each * share * count for each, share, count in zip(rows, shares, counts, strict=True))
    own_calls = sum(len(split(sum(job.request.config.count for job in own), most)) for own in stacks)
    return call * own_calls + work, _ADDED_CALL * call * len(split(sum(counts), most)) + work + extra


def _rows(model: Model, job: Job) -> int:
    guidance = job.request.config.guidance
    assert guidance is not None
    return 2 if model.family.is_guided(model, guidance) else 1


def _share(model: Model, lora: AppliedLora) -> float:
    """Return the multiply-adds that adding a LoRA to the denoiser takes, as a share of those of its weights."""
    placements = [each for each in plan_of(model, lora).placements if each.component == "unet"]
    if not lora.unet:
        return 0.0
    passes = _ADDED_PASSES.get(model.device.type, 0.0) if placements else 0.0
    products = sum((each.factors.rank or 0) * (each.shape[0] + math.prod(each.shape[1:])) for each in placements)
    weights: int = sum(weight.numel() for weight in model.denoiser.parameters() if weight.dim() > 1)
    return passes + products / max(weights, 1)


def _mixed(jobs: Sequence[Job]) -> Group:
    """Return a group that merges what all requests have, and adds the rest."""
    counts = [Counter(lora_key(lora) for lora in job.request.loras) for job in jobs]
    common = counts[0]
    for other in counts[1:]:
        common = common & other
    merged = list[AppliedLora]()
    added = list[list[AppliedLora]]()
    for job in jobs:
        left, own = Counter(common), list[AppliedLora]()
        for lora in job.request.loras:
            key = lora_key(lora)
            if left[key]:
                left[key] -= 1
                if job is jobs[0]:
                    merged.append(lora)
            else:
                own.append(lora)
        added.append(own)
    return Group(list(jobs), merged, added)


def _merged(jobs: Sequence[Job], merge_reason: str = "") -> Group:
    return Group(list(jobs), jobs[0].request.loras, [[] for _ in jobs], merge_reason)


def _limited(jobs: Sequence[Job]) -> list[list[Job]]:
    """Split requests where they have more LoRAs together than there are slots."""
    parts, names = list[list[Job]](), set[object]()
    for job in jobs:
        own = {_slot_key(lora) for lora in job.request.loras}
        if not parts or len(names | own) > MOST_SLOTS:
            parts.append([])
            names = set()
        parts[-1].append(job)
        names |= own
    return parts


def lora_key(lora: AppliedLora) -> Key:
    """Return what two requests with the same LoRA at the same strengths have in common."""
    return stack_key([lora])


def _slot_key(lora: AppliedLora) -> object:
    """Return what LoRAs have in common that share a slot, at any strengths."""
    return lora.source if isinstance(lora.source, Path) else id(lora.source)


def plan_of(model: Model, lora: AppliedLora) -> Plan:
    """Return where a LoRA of a request goes."""
    return lora.source if isinstance(lora.source, Plan) else model.plan(lora.source)


def draw_groups(
    drawing: Drawing,
    jobs: Sequence[Job],
    merge: Callable[[Sequence[AppliedLora]], object],
    condition: Callable[[PreparedRequest, Added], PromptConditioning],
) -> None:
    """Draw requests in their groups.

    Args:
        drawing: makes the images.
        jobs: the requests.
        merge: makes the weights those of a stack.
        condition: encodes the prompts of a request with LoRAs that are added.
    """
    model = drawing.model
    waiting = deque(groups_of(model, jobs, drawing.batch))
    mixed = [group for group in waiting if any(group.added)]
    request = mixed[0].jobs[0].request if mixed else None
    if request is not None and probe_rows(model, lambda: condition(request, ()), request):
        waiting = deque(groups_of(model, jobs, drawing.batch))
    while waiting:
        group = waiting.popleft()
        started = time.perf_counter()
        merge(group.merged)
        added = added_in_slots(model, group)
        seconds = time.perf_counter() - started
        conditionings = [condition(job.request, own) for job, own in zip(group.jobs, added, strict=True)]
        for job, own, conditioning in zip(group.jobs, added, conditionings, strict=True):
            if own and job.request.config.steps:
                conditioning.at(0, job.request.config.steps)
        if not all(conditioning.complete for conditioning in conditionings):
            waiting.extendleft(reversed(groups_of(model, group.jobs, drawing.batch)))
            continue
        for job, each in zip(group.jobs, group.added, strict=True):
            job.result.swap_seconds, job.result.merge_reason = seconds, group.merge_reason
            job.result.added = [lora.name for lora in each]
        drawing(group.jobs, conditionings)


def added_in_slots(model: Model, group: Group) -> list[Added]:
    """Return what is added to each request of a group, in slots."""
    loras = [lora for each in group.added for lora in each]
    if not loras:
        return [() for _ in group.jobs]
    slots = iter(model.row_adapters.load([lora.source for lora in loras]))
    return [tuple((next(slots), strength_of(lora)) for lora in each) for each in group.added]


@torch.no_grad()
def probe_rows(model: Model, prompts: Callable[[], PromptConditioning], request: PreparedRequest) -> bool:
    """Find the layers of the denoiser that do not see the rows of a batch; return whether they were not known."""
    folder = model.blueprint.denoiser.folder
    if model.row_adapters.is_probed(FOLDERS[folder]):
        return False
    conditioning = prompts().at(0, request.config.steps or 1)
    shape = model.latent_space.shape(*request.size)
    both = join(model.family, model, [conditioning] * 2, shape)
    latents = torch.zeros(2, *shape[1:], device=model.device, dtype=model.dtype)
    if model.inpaints:
        latents = torch.cat([latents, latents[:, :1], latents], 1)
    rows = both.expand(latents)
    with network_errors(model), model.using(folder):
        call = partial(run_denoiser, model, rows, latents.new_full((), 500.0), both.inputs)
        model.row_adapters.probe(FOLDERS[folder], len(rows), call)
    return True


def _by(jobs: Sequence[Job], key: Callable[[Job], Key]) -> dict[Key, list[Job]]:
    parts: dict[Key, list[Job]] = {}
    for job in jobs:
        parts.setdefault(key(job), []).append(job)
    return parts
