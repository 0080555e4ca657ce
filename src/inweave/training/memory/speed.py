"""The time of a step, predicted from its operations and its kernel launches.

    operations   passes * operations of one example's forward pass * examples
                 passes: off 2 (frozen weights need no gradients of their own), selective 2.3, full 2.8
    launches     kernels * tensors that one forward pass makes * micro-batches of any size
                 kernels: off 1.5, selective 1.85, full 2.1

    recorded     operations / rate + launches * 3 us        CUDA graph: a kernel ends before the next one starts
    eager        max(operations / rate, launches * 45 us)   Python launches while the device computes

    copies       bytes of streamed blocks / host bandwidth; they run beside the operations: the longer of the two
    conversions  bytes that dequantizing weights reads and writes / memory bandwidth

Host bandwidth is 55 GB/s on an H200 (PCIe 5.0, page-locked memory; 53 to 54 measured with a ring of two slots in a
recorded step); for other kinds of GPU, both bandwidths are typical figures of such cards, not measured.

The rate is 0.58 (on a CPU 0.4) of the rate of large products, because many operations are small or uneven. Compared
with an SDXL UNet on an H200 (1024 pixels, rank 32 on attention): recorded, batch 1 and 4, 51 and 140 ms predicted, 50.5
and 143 measured; with full checkpointing 71 and 196 predicted, 72.2 and 193 measured. Eager, four one by one and two by
two with full checkpointing: 1.32 and 0.93 s predicted, 1.33 to 1.67 and 1.15 to 1.38 measured on two hosts.

A plan has to be the same on every process and in every run of one configuration, so it uses a table of rates; the
estimate for users measures the rate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inweave.training.config.schema import TrainConfig
from inweave.training.execution.capture import is_recorded

PASSES = {"off": 2.0, "selective": 2.3, "full": 2.8}
KERNELS = {"off": 1.5, "selective": 1.85, "full": 2.1}
GPU_UTILIZATION, CPU_UTILIZATION = 0.58, 0.4
RECORDED_LAUNCH, EAGER_LAUNCH = 3e-6, 45e-6

#: products with each quantized weight in a step: forward, backward, and again where blocks are recomputed
PRODUCTS = {"off": 2.0, "selective": 2.3, "full": 3.0}
#: format -> bytes that one product reads and writes for each parameter, besides those of the product itself
CONVERSION = {"off": 0, "fp8": 2, "int8": 19, "int8-hadamard": 33, "nf4": 40, "nf4-hadamard": 180}
OTHER_CONVERSION = 40
#: compute capability -> bytes per second of (host to device, device memory); of no listed kind: PCIe 3.0
_BANDWIDTHS = {
    (8, 0): (25e9, 1.5e12), (8, 6): (25e9, 0.5e12), (8, 9): (25e9, 0.6e12), (9, 0): (55e9, 4e12), (10, 0): (55e9, 6e12),
    (12, 0): (55e9, 0.9e12),
}  # fmt: skip
_OTHER_BANDWIDTHS = 12e9, 0.4e12

#: compute capability -> operations per second of one multiprocessor in large bf16 products; 1e12 for others
_MULTIPROCESSOR = {(8, 0): 2.3e12, (8, 6): 0.7e12, (8, 9): 1.0e12, (9, 0): 6.0e12, (10, 0): 12e12, (12, 0): 1.0e12}


@dataclass(frozen=True, slots=True)
class Speed:
    """Operations per second that a step reaches, and seconds per launch; ``recorded``: in CUDA graphs.

    ``host`` and ``memory``: bytes per second from the host to the device, and of the device's memory.
    """

    rate: float
    launch: float = 0.0
    recorded: bool = False
    host: float = 55e9
    memory: float = 4e12

    def seconds(self, needs: Mapping[str, Any]) -> float:
        """Return the seconds of a step with these `operations_per_step` and `launches_per_step`."""
        compute: float = needs["operations_per_step"] / self.rate + needs.get("converted_per_step", 0) / self.memory
        launching: float = needs["launches_per_step"] * self.launch
        computing = compute + launching if self.recorded else max(compute, launching)
        copying: float = needs.get("copied_per_step", 0) / self.host
        return max(computing, copying)


def speed_of(device: torch.device, config: TrainConfig, *, measured: bool = False) -> Speed:
    """Return the speed of a device on the steps of a run; ``measured``: time its rate instead of looking it up."""
    recorded = is_recorded(config, device)
    launch = 0.0 if device.type != "cuda" else RECORDED_LAUNCH if recorded else EAGER_LAUNCH
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.precision, torch.bfloat16)
    rate = product_rate(device, dtype) if measured else _listed_rate(device, dtype)
    utilization = GPU_UTILIZATION if device.type == "cuda" else CPU_UTILIZATION
    if device.type != "cuda":
        return Speed(utilization * rate, launch, recorded)
    host, memory = _BANDWIDTHS.get(torch.cuda.get_device_capability(device), _OTHER_BANDWIDTHS)
    return Speed(utilization * rate, launch, recorded, host, memory)


def speed_of_card(capability: tuple[int, int], multiprocessors: int) -> Speed:
    """Return the speed of a GPU on recorded steps in bf16, from its compute capability alone: a prediction."""
    rate = _MULTIPROCESSOR.get(capability, 1e12) * multiprocessors
    return Speed(GPU_UTILIZATION * rate, RECORDED_LAUNCH, True, *_BANDWIDTHS.get(capability, _OTHER_BANDWIDTHS))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the additions and multiplications per second in a large matrix product: the best of a few."""
    side = 8192 if device.type == "cuda" else 768
    factor = torch.randn(side, side, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        factor @ factor
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def _listed_rate(device: torch.device, dtype: torch.dtype) -> float:
    if device.type != "cuda":
        return 1e11  # launches cost nothing, so any rate leads to the same order
    properties = torch.cuda.get_device_properties(device)
    each = _MULTIPROCESSOR.get((properties.major, properties.minor), 1e12)
    return each * properties.multi_processor_count / (8 if dtype == torch.float32 else 1)
