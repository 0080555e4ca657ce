"""A plain 2D convolution and its LoRA as one operation in training (`inweave.ops.linear.conv`).

Conditions, as for linear layers (`inweave.layers.fused`): torch's own forward of nn.Conv2d without hooks, zero padding,
one group, a frozen weight of the input's dtype, one LoRA without Tucker core, blocks, magnitude or active dropout, no
autocast, and channels-last memory, which training uses for a denoiser on a GPU. Not in a compiled region, where the
compiler fuses the sum with the operations that follow, and not under selective checkpointing, which stores the
convolution's output while this adds to it in place.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from inweave.layers import fused
from inweave.layers.branch import Branch
from inweave.layers.fused import is_frozen, is_plain_lora, rounded_copies
from inweave.layers.lora import LoraBranch
from inweave.ops.common.modules import is_unchanged
from inweave.ops.kinds import ConvKind, LayerKind, registered_kind
from inweave.ops.linear.conv import Window, lora_conv2d


def is_plain_conv(base: nn.Module, kind: LayerKind) -> bool:
    """Return whether the module's class and settings are those of a plain 2D convolution."""
    return (
        type(kind) is ConvKind
        and registered_kind(base) is None
        and isinstance(base, nn.Conv2d)
        and type(base).forward is nn.Conv2d.forward
        and type(base)._conv_forward is nn.Conv2d._conv_forward
        and _pads_zeros(base)
        and base.groups == 1
    )


def _pads_zeros(base: nn.Conv2d) -> bool:
    return base.padding_mode == "zeros" and isinstance(base.padding, tuple)


class FusedConv:
    """The operation for one module and its acting adapter."""

    def __init__(self, base: nn.Module) -> None:
        self.base = cast("nn.Conv2d", base)

    def output(self, x: torch.Tensor, acting: tuple[tuple[Branch, float], ...], training: bool) -> torch.Tensor | None:
        """Return the layer's output, or None to take the general path. At least one adapter acts."""
        base, kind, dtype = self.base, x.device.type, x.dtype
        if (
            kind not in fused.DEVICES
            or dtype not in fused.DTYPES
            or len(acting) > 1
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or x.dim() != 4
            or not x.is_contiguous(memory_format=torch.channels_last)
            or torch.is_autocast_enabled(kind)
            or is_in_torch_dispatch_mode()
        ):
            return None
        weight, bias = base._parameters.get("weight"), base._parameters.get("bias")
        ((branch, strength),) = acting
        if (
            weight is None
            or not _pads_zeros(base)  # padding_mode can change on a live model, for tiling images
            or not is_unchanged(base)
            or not is_frozen(weight, dtype)
            or not is_frozen(bias, dtype)
            or not is_plain_lora(branch, training)
        ):
            return None
        lora = cast("LoraBranch", branch)
        rounded_down, rounded_up = rounded_copies(lora, dtype)
        window = Window(*(cast("tuple[int, int]", each) for each in (base.stride, base.padding, base.dilation)))
        return lora_conv2d(
            x, weight, bias, lora.down, lora.up, strength * lora.scale, window,
            rounded_down=rounded_down, rounded_up=rounded_up,
        )  # fmt: skip
