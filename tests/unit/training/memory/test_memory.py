"""Gradient checkpointing gives the same gradients and saves memory; a plan fits its limit and gives its reasons."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from inweave.bench.models import published_blueprint as published  # noqa: E402
from inweave.errors import MemoryBudgetError  # noqa: E402
from inweave.layers import AdapterSpec, inject  # noqa: E402
from inweave.models.blank import blank  # noqa: E402
from inweave.models.open import open_model  # noqa: E402
from inweave.ops.attention import MAX_WORKSPACE  # noqa: E402
from inweave.ops.tensors.peak import MetaAttention  # noqa: E402
from inweave.training.adapters.attach import attach_adapters  # noqa: E402
from inweave.training.config.schema import TrainConfig  # noqa: E402
from inweave.training.execution.capture import is_recorded, recording_pays  # noqa: E402
from inweave.training.memory import plan as planning  # noqa: E402
from inweave.training.memory.checkpointing import apply_checkpointing  # noqa: E402
from inweave.training.memory.estimate import GIB, Measurements, estimate  # noqa: E402
from inweave.training.memory.meta import Measured, measure  # noqa: E402
from inweave.training.memory.plan import MemoryPlan, limit_for  # noqa: E402
from inweave.training.memory.speed import (  # noqa: E402
    EAGER_LAUNCH,
    KERNELS,
    PASSES,
    RECORDED_LAUNCH,
    Speed,
    speed_of,
)
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, task_on  # noqa: E402

MODES = ("off", "selective", "full")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


# computing again


class Watch(TorchDispatchMode):
    """Counts operations, and knows which of the tensors made are still there."""

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        there = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self.operations: Counter[str] = Counter()
        self.frozen: Counter[str] = Counter()  # products with a frozen weight
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0]
        self.operations[name] += 1
        if name in ("mm", "addmm", "convolution") and not args[{"addmm": 2}.get(name, 1)].requires_grad:
            self.frozen[name] += 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._there:
                    self._storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return output

    @property
    def alive(self) -> int:
        return sum(size for storage_ref, size in self._storages.values() if storage_ref() is not None)


def block_calls(network: nn.Module, kinds: tuple[str, ...]) -> list[str]:
    calls: list[str] = []
    for name, module in network.named_modules():
        if type(module).__name__ in kinds:
            module.register_forward_pre_hook(lambda _m, _a, name=name: calls.append(name))
    return calls


def one_step(variant: str, mode: str, data: Path) -> dict[str, Any]:
    """Forward, then backward, on a fresh model; text encoders are trained too where there are few."""
    model = fresh_model(variant)
    settings: dict[str, Any] = {"targets": "attention-mlp", "rank": 4}
    if variant == "sd1.5":
        settings |= {"train_text_encoders": True}
    task = task_on(data, model=model, **settings)
    trained = attach_adapters(task.networks, task.config)
    generator = torch.Generator().manual_seed(0)
    for parameter in trained.parameters.values():  # zeros would hide what goes wrong
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    apply_checkpointing(task.networks, mode)
    calls = block_calls(
        nn.ModuleDict(dict(task.networks)),
        (
            "BasicTransformerBlock",
            "JointTransformerBlock",
            "FluxTransformerBlock",
            "ZImageTransformerBlock",
            "QwenImageTransformerBlock",
            "CLIPMLP",
        ),
    )
    inputs = sample_inputs(task)
    with Watch(model.networks.values()) as forward:
        loss = task.loss(inputs)
        activations = forward.alive
    first = len(calls)
    with Watch(model.networks.values()) as backward:
        torch.autograd.backward(loss)
    return {
        "loss": float(loss), "kept": activations,
        "grads": {  # the last block of Qwen-Image leaves its text unused
            name: parameter.grad for name, parameter in trained.parameters.items() if parameter.grad is not None
        },
        "first": first, "again": len(calls) - first, "forward": forward, "backward": backward,
    }  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", ["sd1.5", "sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image"])
def test_checkpointing(variant: str, tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    steps = {mode: one_step(variant, mode, data) for mode in MODES}
    off, selective, full = (steps[mode] for mode in MODES)
    for other in (selective, full):
        assert other["loss"] == pytest.approx(off["loss"], rel=1e-6)
        for name, grad in off["grads"].items():
            torch.testing.assert_close(other["grads"][name], grad, rtol=1e-4, atol=1e-7, msg=name)
    assert sum(float(grad.abs().sum()) for grad in off["grads"].values()) > 0
    assert off["again"] == 0 and full["again"] == full["first"] > 0, "every block once more"
    assert full["kept"] < selective["kept"] < off["kept"]

    def products(which: dict[str, Any]) -> int:
        return sum(which["backward"].frozen[name] for name in ("addmm", "convolution"))

    # a frozen product in the backward pass is one computed again: its gradient needs no bias, and is an mm
    blocks = off["forward"].frozen["addmm"]
    assert products(off) == 0 and products(selective) <= blocks // 3, "only those that widen"
    assert products(full) > (0 if variant == "z-image-turbo" else blocks // 2)  # whose blocks have few biases
    norms = ("native_layer_norm", "native_group_norm", "gelu", "silu")
    again = sum(selective["backward"].operations[name] for name in norms)
    assert again > 0 and sum(off["backward"].operations[name] for name in norms) == 0, "cheap ones are computed again"


def test_saved_tensors_shrink_with_full_checkpointing(tmp_path: Path) -> None:
    """What autograd itself holds; selective saves its products elsewhere, which only the count of storages sees."""
    data, sizes = make_set(tmp_path / "set"), {}
    for mode in MODES:
        model = fresh_model()
        task = task_on(data, model=model)
        attach_adapters(task.networks, task.config)
        apply_checkpointing(task.networks, mode)
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = sample_inputs(task)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            task.loss(inputs)
        sizes[mode] = sum(storages.values())
    assert sizes["full"] < sizes["off"] and sizes["selective"] < sizes["off"]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradient_checkpointing_of_language_models_disables_cache_and_dropout(mode: str) -> None:
    grads, calls = {}, {}
    for each in ("off", mode):
        torch.manual_seed(0)
        network = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, resid_pdrop=0.5, attn_pdrop=0.5)
        ).eval()
        inject(network, 2, 2, ["c_attn", "c_proj"], name="x", spec=AdapterSpec(seed=1))
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.ones_like(parameter)
        apply_checkpointing({"model": network}, each)
        calls[each] = block_calls(network, ("GPT2MLP",))
        network(input_ids=torch.arange(12)[None] % 32).logits.square().mean().backward()
        grads[each] = [p.grad for p in network.parameters() if p.requires_grad]
        assert not any(module.training for module in network.modules() if isinstance(module, nn.Dropout))
    assert len(calls["off"]) == 2 and len(calls[mode]) == 4
    for one, other in zip(grads["off"], grads[mode], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    with torch.no_grad():
        network(input_ids=torch.arange(4)[None])
    assert len(calls[mode]) == 6, "without gradients nothing is computed again"


# estimates, on the published models without their weights


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.of(dataset="-", **{"rank": 32, "precision": "bf16", "targets": "attention", **settings})


def plan_memory(blueprint: Any, settings: TrainConfig, limit: int, speed: Speed, **options: Any) -> MemoryPlan:
    return planning.plan_memory(Measurements(blueprint, settings), settings, limit, speed, **options)


def test_a_model_without_weights_has_their_sizes() -> None:
    model = blank(published("sdxl"), torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.denoiser.parameters())
    assert size == pytest.approx(2.567e9 * 2, rel=0.01) and all(p.is_meta for p in model.denoiser.parameters())
    assert next(model.vae.parameters()).dtype == torch.float32, "SDXL's autoencoder overflows in less"


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_fused_blocks_are_planned_with_what_they_store(mode: str) -> None:
    """On a GPU a step stores less, and the plan knows; on the CPU it is planned as ever."""
    checkpoint = partial(apply_checkpointing, mode=mode, recompute_in=MetaAttention)
    settings, blueprint = config(gradient_checkpointing=mode), open_model("inweave/emoji")
    plain, fused = (
        measure(blueprint, settings, torch.bfloat16, checkpoint, backward=mode != "off", fused=fused)
        for fused in (False, True)
    )
    assert fused.weights == plain.weights and fused.operations == plain.operations
    share = fused.activations / plain.activations
    assert {"off": 0.6, "selective": 0.75, "full": 0.7}[mode] < share < {"off": 0.85, "selective": 1, "full": 1}[mode]


def test_attention_in_a_fixed_order_is_planned_with_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN stores them in 16 bits: the largest attention has 4 heads of 16 x 16 tokens, the next 32 of text."""
    module = "inweave.training.memory.estimate"
    blueprint, settings = open_model("inweave/emoji"), config(gradient_checkpointing="off")
    checkpoint = partial(apply_checkpointing, mode="off", recompute_in=MetaAttention)
    measured = measure(blueprint, settings, torch.bfloat16, checkpoint, backward=False, fused=True)
    largest, second, *_ = sorted(measured.scores, reverse=True)
    assert (largest, second) == (4 * 256**2, 4 * 256 * 32)
    monkeypatch.setattr(f"{module}.measure", lambda *_, **__: measured)
    monkeypatch.setattr(f"{module}.choose_device", torch.device)

    def activations(version: str | None, **changes: Any) -> int:
        monkeypatch.setattr(f"{module}.frontend_version", lambda: version)
        number: int = estimate(blueprint, config(device="cuda", **changes))["activation_bytes"]
        return number

    for batch in (1, 2):
        plain = activations("1.32.0", batch_size=batch)
        assert activations("1.32.0", batch_size=batch, deterministic=True) == plain + 2 * batch * largest
        assert activations(None, batch_size=batch, deterministic=True) == plain
    # another kernel computes what needs more than cuDNN may use, and cuDNN the rest
    many = MAX_WORKSPACE // (2 * largest) + 1
    assert activations("1.32.0", batch_size=many, deterministic=True) == many * (measured.activations + 2 * second)


def test_sdxl_takes_what_is_published() -> None:
    """About 13 GiB in bfloat16 at 1024 pixels, batch 1, rank 32; about 6.5 with checkpointing and cached text."""
    without = estimate(published("sdxl"), config(device="cpu"))
    assert 13 / 2 < without["total_bytes"] / GIB < 13 * 2
    assert 11 < without["total_bytes"] / GIB < 16, "closer than required, and it should stay so"
    for key in ("weights_bytes", "trained_bytes", "activation_bytes", "total_bytes", "steps"):
        assert key in without
    assert without["trained_parameters"] == 46_448_640
    assert without["trained_bytes"] == 16 * 46_448_640
    # on the CPU it is planned without the blocks that are fused on a GPU
    assert without["launches_per_step"] == pytest.approx(7_224, rel=0.1), "kernels of the real step on an H200"


@pytest.mark.full
def test_sdxl_with_gradient_checkpointing_takes_what_is_published() -> None:
    without = estimate(published("sdxl"), config())
    staged_estimate = estimate(published("sdxl"), config(gradient_checkpointing="full"), staged=True)
    assert 6.5 / 2 < staged_estimate["total_bytes"] / GIB < 6.5 * 2
    assert 5 < staged_estimate["total_bytes"] / GIB < 8
    assert without["trained_parameters"] == staged_estimate["trained_parameters"]
    assert staged_estimate["activation_bytes"] < 0.2 * without["activation_bytes"]


@pytest.mark.full
def test_flux_needs_more_than_24_gb() -> None:
    plan = plan_memory(published("flux1-dev"), config(rank=16, gradient_checkpointing="full"), 32 * GIB, ARITHMETIC)
    assert plan.staged and plan.changes == {}, "with T5 on the device 34 would be needed"
    assert plan.estimate["weights_bytes"] == pytest.approx(23.8e9, rel=0.01)
    assert 24e9 < plan.estimate["total_bytes"] < 2 * 24e9


# plans, on numbers that leave nothing to measure: where launches cost nothing, what recomputes is slower

ARITHMETIC = Speed(1e11)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """1 GiB of denoiser and 1 of everything else in 16 bits; an example keeps 4, 2 and 1 GiB by mode."""

    def fake(blueprint: Any, config: TrainConfig, dtype: torch.dtype, *_: Any, backward: bool, **__: Any) -> Measured:
        times = 2 if dtype == torch.float32 else 1
        factor = {"off": 4, "selective": 2, "full": 1}[config.gradient_checkpointing]
        assert backward == (config.gradient_checkpointing != "off")
        weights = {"unet": GIB, "vae": GIB // 4, "text_encoder": GIB // 2, "text_encoder_2": GIB // 4}
        sizes = {n: size * times for n, size in weights.items()}
        return Measured(sizes, 1 << 20, factor * GIB * times, GIB // 4, 6_760_000_000_000, 4903)

    monkeypatch.setattr("inweave.training.memory.estimate.measure", fake)
    return lambda: None


@pytest.mark.parametrize(
    ("limit", "split", "changes", "staged"),
    [
        (20.5, 1, {}, False),
        (18.9, 1, {}, True),  # the encoders leave, and that is enough
        (12.5, 2, {}, True),
        (6.5, 4, {}, True),
        (4.5, 4, {"gradient_checkpointing": "selective"}, True),
        (3.2, 4, {"gradient_checkpointing": "full"}, True),
    ],
)
def test_a_plan_changes_as_little_as_it_can(
    sizes: Any, limit: float, split: int, changes: dict[str, Any], staged: bool
) -> None:
    requested = config(batch_size=4)
    plan = plan_memory(published("sdxl"), requested, int(limit * GIB), ARITHMETIC)
    assert dict(plan.changes) == changes and plan.staged is staged and plan.split == split
    assert plan.estimate["total_bytes"] <= limit * GIB
    assert plan.config == requested.model_copy(update=changes)
    reasons = "\n".join(plan.reasons)
    assert all(name in reasons for name in changes)
    assert (f"batches of 4 are computed {4 // split} at a time" in reasons) == (split > 1)


H200 = 0.58 * 132 * 6e12
RECORDED, EAGER = Speed(H200, RECORDED_LAUNCH, recorded=True), Speed(H200, EAGER_LAUNCH)


def sdxl_needs(batch: int, parts: int, mode: str) -> dict[str, Any]:
    """A step of SDXL at 1024 pixels: 6.76 Tera-operations per image, and 4,903 tensors made, in a forward pass."""
    passes, kernels = PASSES[mode], KERNELS[mode]
    return {"operations_per_step": 6.76e12 * passes * batch, "launches_per_step": 4903 * kernels * parts}


@pytest.mark.parametrize(
    ("speed", "batch", "parts", "mode", "measured"),
    [
        (RECORDED, 1, 1, "off", 0.0514),
        (RECORDED, 4, 1, "off", 0.140),
        (RECORDED, 4, 1, "selective", 0.160),
        (RECORDED, 1, 1, "full", 0.0729),
        (RECORDED, 4, 1, "full", 0.191),
        (EAGER, 1, 1, "off", 0.357),
        (EAGER, 4, 1, "off", 0.390),
        (EAGER, 4, 4, "off", 1.33),
        (EAGER, 4, 2, "full", 1.15),
    ],
)
def test_predicted_seconds_are_those_of_the_benchmarks(
    speed: Speed, batch: int, parts: int, mode: str, measured: float
) -> None:
    """docs/benchmarks.md: SDXL at full size on an H200; the host of an eager step may be a fifth slower or faster."""
    predicted = speed.seconds(sdxl_needs(batch, parts, mode))
    assert predicted == pytest.approx(measured, rel=0.03 if speed.recorded else 0.2)


@pytest.mark.parametrize(
    ("speed", "limit", "split", "mode"),
    [
        # 4.5 GiB are left: four parts without recomputation, two with selective, one with full
        (ARITHMETIC, 6.5, 4, "off"),
        (RECORDED, 6.5, 2, "selective"),  # 0.21, 0.19 and 0.20 s
        (EAGER, 6.5, 1, "full"),  # 1.32, 0.82 and 0.46 s
        # 9: two parts without recomputation, or one with
        (ARITHMETIC, 11.0, 2, "off"),
        (RECORDED, 11.0, 2, "off"),  # 0.162 and 0.163 s
        (EAGER, 11.0, 1, "selective"),  # 0.66 and 0.41 s
        # 2: four parts with selective recomputation, or two with full
        (ARITHMETIC, 4.5, 4, "selective"),
        (RECORDED, 4.5, 2, "full"),  # 0.24 and 0.23 s
        (EAGER, 4.5, 2, "full"),  # 1.63 and 0.93 s
    ],
)
def test_a_plan_is_the_fastest_that_fits(sizes: Any, speed: Speed, limit: float, split: int, mode: str) -> None:
    plan = plan_memory(published("sdxl"), config(batch_size=4), int(limit * GIB), speed)
    assert (plan.split, plan.config.gradient_checkpointing) == (split, mode)
    assert plan.estimate["total_bytes"] <= limit * GIB
    every = [
        (speed.seconds(sdxl_needs(4, parts, each)), parts, each)
        for factor, each in ((4, "off"), (2, "selective"), (1, "full"))
        for parts in (1, 2, 4)
        if factor * 4 // parts <= limit - 2
    ]
    assert speed.seconds(plan.estimate) <= 1.03 * min(every)[0]


def test_a_plan_for_compiled_blocks_never_recomputes_selectively(sizes: Any) -> None:
    for limit in (11.0, 4.5):
        plan = plan_memory(published("sdxl"), config(batch_size=4, compile="on"), int(limit * GIB), ARITHMETIC)
        assert plan.config.gradient_checkpointing in ("off", "full")


def test_what_is_recorded_is_what_a_run_records() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert is_recorded(config(), cuda) and is_recorded(config(steps=20), cuda) and is_recorded(config(epochs=2), cuda)
    assert is_recorded(config(steps=2, graph="on"), cuda)
    for settings in ({"graph": "off"}, {"steps": 19}, {"shard": True}):
        assert not is_recorded(config(**settings), cuda), settings
    assert not is_recorded(config(), cpu)
    assert speed_of(cpu, config()) == Speed(0.4 * 1e11)
    assert speed_of(cpu, config(precision="fp32"), measured=True).rate > 1e8  # some CPUs compute bf16 in software


def test_recording_pays_for_runs_that_replay_every_size_often() -> None:
    assert recording_pays(20, 20, 1) and not recording_pays(19, 19, 1)
    assert recording_pays(20, 20, 2) and not recording_pays(20, 20, 3), "each size is recorded"
    assert recording_pays(20, 80, 8), "four micro-batches are four replays"


def test_batches_are_split_evenly_and_choices_are_kept(sizes: Any) -> None:
    plan = plan_memory(published("sdxl"), config(batch_size=6, gradient_accumulation=2), int(14.5 * GIB), ARITHMETIC)
    assert (plan.config.batch_size, plan.config.gradient_accumulation, plan.split) == (6, 2, 2)
    resumed = plan_memory(
        published("sdxl"), config(batch_size=6, gradient_accumulation=2), 64 * GIB, ARITHMETIC, split=2
    )
    assert resumed.split == 2 and resumed.estimate["activation_bytes"] == plan.estimate["activation_bytes"]
    full = plan_memory(
        published("sdxl"), config(batch_size=2, gradient_checkpointing="full"), int(3.2 * GIB), ARITHMETIC
    )
    assert full.config.gradient_checkpointing == "full" and full.split == 2
    loose = plan_memory(
        published("sdxl"), config(batch_size=1, cache_latents=False, cache_text=False), int(6.5 * GIB), ARITHMETIC
    )
    assert loose.config.cache_latents and loose.config.cache_text, "what leaves the device is cached"
    text = plan_memory(
        published("sdxl"), config(train_text_encoders=True, cache_text=False), int(6.9 * GIB), ARITHMETIC
    )
    assert not text.config.cache_text and text.estimate["weights_bytes"] == 1.75 * GIB, "encoders that are trained stay"


def test_precision_is_the_last_resort(sizes: Any) -> None:
    wide = config(precision="fp32", batch_size=1)
    assert plan_memory(published("sdxl"), wide, int(5.2 * GIB), ARITHMETIC).changes == {
        "gradient_checkpointing": "full"
    }
    plan = plan_memory(published("sdxl"), wide, int(4.5 * GIB), ARITHMETIC)
    assert plan.changes == {
        "precision": "bf16",
        "gradient_checkpointing": "selective",
    } and "changes results" in "\n".join(plan.reasons)


def test_a_plan_that_cannot_fit_suggests_what_would_help(sizes: Any) -> None:
    with pytest.raises(MemoryBudgetError, match=r"2\.00 GiB is not enough.*lower resolution.*raise the limit"):
        plan_memory(published("sdxl"), config(batch_size=4), 2 * GIB, ARITHMETIC)
    with pytest.raises(MemoryBudgetError, match="the weights alone are too large"):
        plan_memory(published("sdxl"), config(), int(1.5 * GIB), ARITHMETIC)
    with pytest.raises(MemoryBudgetError, match=r"CUDA and its libraries 1\.00 GiB\); CUDA .* alone take more"):
        plan_memory(published("sdxl"), config(), GIB, ARITHMETIC)
    with pytest.raises(MemoryBudgetError, match="train_text_encoders = false"):
        plan_memory(published("sdxl"), config(train_text_encoders=True, cache_text=False), int(2.9 * GIB), ARITHMETIC)


def test_limits() -> None:
    cpu = torch.device("cpu")
    assert limit_for(config(vram="12GiB"), cpu) == 12 * GIB
    assert limit_for(config(), cpu) is None and limit_for(config(vram="auto"), cpu) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("network", ["lora", "locon", "dora", "loha", "lokr"])
def test_every_network_can_be_measured(network: str, tmp_path: Path) -> None:
    model = fresh_model()
    breakdown = estimate(model, config(network=network, resolution=64, rank=4, precision="fp32"), 7)
    assert breakdown["steps"] == 7 and breakdown["activation_bytes"] > 0
    parameters = attach_adapters({"unet": model.denoiser}, config(network=network, rank=4)).parameters
    assert breakdown["trained_parameters"] == sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", ["sd1.5", "flux1-dev", "z-image-turbo"])
def test_the_estimate_is_the_activation_memory_of_a_real_step(variant: str, tmp_path: Path) -> None:
    """On the CPU, where attention is fused too."""
    data, model = make_set(tmp_path / "set"), fresh_model(variant)
    settings: dict[str, Any] = {"targets": "attention-mlp", "rank": 4, "resolution": 64, "precision": "fp32"}
    task = task_on(data, model=model, batch_size=1, **settings)
    estimated = estimate(model, config(**settings), chunks=task.chunks)["activation_bytes"]
    attach_adapters(task.networks, task.config)
    inputs = sample_inputs(task, 0, (0,))
    with Watch(model.networks.values()) as watch:
        loss = task.loss(inputs)
        alive = watch.alive
    assert float(loss) > 0 and estimated == pytest.approx(alive, rel=0.25)


@pytest.mark.full
def test_selective_checkpointing_of_sdxl_stores_little_more_than_half() -> None:
    """Of what the blocks that train on a GPU store: the widening product of a feed-forward part is recomputed."""
    stored = {}
    for mode in ("off", "selective"):
        settings = config(gradient_checkpointing=mode, rank=32, targets="attention", resolution=256)
        checkpoint = partial(apply_checkpointing, mode=mode, recompute_in=MetaAttention)
        blueprint = published("sdxl")
        stored[mode] = measure(blueprint, settings, torch.bfloat16, checkpoint, backward=True, fused=True).activations
    assert stored["selective"] <= 0.6 * stored["off"]
