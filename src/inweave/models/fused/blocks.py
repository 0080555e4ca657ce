"""diffusers' blocks with fewer passes over memory: the same modules, parameters and names, other forward functions.

    GroupNorm                one kernel pair on channels-last memory (`ops.norm`)
    ResnetBlock2D            norm + SiLU in one; the time embedding is added inside the second norm; no division by 1;
                             the residual's gradient is added inside of the first norm's backward pass; biases of
                             convolutions are added with the time embedding and with the residual (`ops.residual`)
    Transformer2DModel       no copy to channels-first at its end
    BasicTransformerBlock    residual sum + layer norm in one, forward and backward (`ops.row_norm`)
    Attention                no division by 1; one product for queries, keys and values (`models.siblings`);
                             with two streams and in Flux see `fused.joint`, with complex rotations `fused.complex`
    UNet2DConditionModel     one product for the keys and values of all cross attentions
    GEGLU, RMSNorm           one kernel each way (`ops.activation`, `ops.row_norm`)
    GELU, FeedForward        with tanh; frozen and in 8 bits as one operation (`fused_feed_forward`)
    Conv2d                   stores no input for the gradient of a frozen weight (`ops.frozen_conv`)

`fuse_blocks` gives a module a subclass of its own class, so its state dict, names, hooks and children stay;
`restore_blocks` restores the class. Children are called as modules, so any of them may have adapters. Norms are not,
unless they have hooks, and then diffusers' own forward runs. Frozen weights of convolutions become channels-last, and
with them all activations between the blocks.

A module is fused if its class is the very one of diffusers, takes the arguments and has the attributes that the formula
here needs, with the values that it supports; other modules stay unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.activations import GEGLU, GELU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxSingleTransformerBlock
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.fitting import accepts, has, has_all
from inweave.models.fused import complex, feed_forward, joint
from inweave.models.siblings import Group, TextProjections, project, shared_text, unstack_siblings
from inweave.ops.activation import geglu
from inweave.ops.common.gradients import are_frozen
from inweave.ops.common.modules import is_unchanged
from inweave.ops.conv import frozen_conv2d
from inweave.ops.group_norm import group_norm, group_norm_and_input
from inweave.ops.residual import residual_sum
from inweave.ops.row_norm import add_layer_norm, layer_norm_and_input, rms_norm


def fuse_blocks(network: nn.Module, *, in_place: bool = False) -> int:
    """Fuse what can be fused in a network whose base is frozen; returns the number of modules that changed.

    ``in_place``: weights stay where they are, for a Weaver that writes them; convolutions arrange them in each call.
    """
    count = 0
    for module in list(network.modules()):
        for plain, fused, fits in _FUSED:
            if type(module) is plain and fits(module):
                module.__class__ = fused
                count += 1
    if not in_place and any(type(module) is FusedGroupNorm for module in network.modules()):
        _set_layout(network, torch.channels_last)
    return count


def restore_blocks(network: nn.Module) -> int:
    """Undo `fuse_blocks`; returns the number of modules that changed."""
    count = 0
    plain = {fused: kind for kind, fused, _ in _FUSED}
    for module in network.modules():
        if type(module) in plain:
            module.__class__ = plain[type(module)]
            count += 1
    unstack_siblings(network)
    if count:
        _set_layout(network, torch.contiguous_format)
    return count


def _set_layout(network: nn.Module, layout: torch.memory_format) -> None:
    """Set the memory format of frozen weights; trained ones are views of one flat buffer."""
    for parameter in network.parameters():
        if parameter.dim() == 4 and not parameter.requires_grad:
            parameter.data = parameter.data.contiguous(memory_format=layout)


class FusedGroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.weight, self.bias, self.num_groups, self.eps)


class FrozenConv2d(nn.Conv2d):
    computes_plainly = True  # by another kernel

    def forward(self, input: Tensor) -> Tensor:
        return self.convolve(input, self.bias)

    def convolve(self, input: Tensor, bias: Tensor | None) -> Tensor:
        stride, padding, dilation = ((size[0], size[1]) for size in (self.stride, self.padding, self.dilation))
        return frozen_conv2d(input, self.weight, bias, stride, padding, dilation, self.groups)  # type: ignore[arg-type]


class FusedGEGLU(GEGLU):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return geglu(self.proj(hidden_states))


class FusedRMSNorm(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.weight is not None and self.weight.dtype != hidden_states.dtype:  # the result has the wider of the two
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, self.eps)


class FusedResnetBlock2D(ResnetBlock2D):
    def forward(self, input_tensor: Tensor, temb: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not all(map(is_unchanged, (self.norm1, self.norm2, self.nonlinearity))):
            return super().forward(input_tensor, temb, *args, **kwargs)
        h, skip = _norm_silu(self.norm1, input_tensor)
        h, bias = _product_and_bias(self.conv1, h)
        shift = self.time_emb_proj(self.nonlinearity(temb))
        h, _ = _norm_silu(self.norm2, h, shift if bias is None else shift + bias)
        h, bias = _product_and_bias(self.conv2, self.dropout(h))
        skip, skip_bias = (skip, None) if self.conv_shortcut is None else _product_and_bias(self.conv_shortcut, skip)
        return residual_sum(skip, h, bias, skip_bias)


class FusedTransformer2DModel(Transformer2DModel):
    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        h = self.proj_out(hidden_states) if self.use_linear_projection else hidden_states
        h = h.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)  # channels-last without a copy
        return residual_sum(h if self.use_linear_projection else self.proj_out(h), residual)


class FusedBasicTransformerBlock(BasicTransformerBlock):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: torch.LongTensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: torch.LongTensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        unchanged = all(map(is_unchanged, (self.norm1, self.norm2, self.norm3)))
        if cross_attention_kwargs or self._chunk_size is not None or not unchanged:
            return super().forward(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                cross_attention_kwargs or {}, class_labels, added_cond_kwargs,
            )  # fmt: skip
        if self.only_cross_attention or attention_mask is not None or type(self.attn1) is not FusedAttention:
            stream, h = layer_norm_and_input(hidden_states, *_affine(self.norm1))
            context = encoder_hidden_states if self.only_cross_attention else None
            h = self.attn1(h, encoder_hidden_states=context, attention_mask=attention_mask)
        else:
            stream, *inputs = layer_norm_and_input(hidden_states, *_affine(self.norm1), uses=self.attn1.inputs)
            h = self.attn1(tuple(inputs))
        stream, h = add_layer_norm(stream, h, *_affine(self.norm2))
        h = self.attn2(h, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        stream, h = add_layer_norm(stream, h, *_affine(self.norm3))
        return self.ff(h) + stream  # type: ignore[no-any-return]


class FusedAttention(Attention):
    siblings: dict[str, Group] = {}  # noqa: RUF012  replaced, never changed
    text: TextProjections | None = None

    @property
    def projects_siblings(self) -> bool:
        return not self.is_cross_attention

    @property
    def reads_text(self) -> bool:
        return self.is_cross_attention

    @property
    def inputs(self) -> int:
        """The number of equal inputs: one for each projection, so that their gradients are summed in one kernel."""
        group = self.siblings.get("to_q")
        return 3 if group is None or not group.is_joint else 1

    def forward(
        self,
        hidden_states: Tensor | tuple[Tensor, ...],
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """Compute attention; three equal ``hidden_states`` give queries, keys and values a gradient each."""
        inputs = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        hidden_states = inputs[0]
        processor: Any = self.processor
        plain = type(processor) is AttnProcessor2_0 and attention_mask is None and not cross_attention_kwargs
        if not plain or hidden_states.dim() != 3:
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
        q, k, v = (
            projected.view(*projected.shape[:-1], self.heads, -1).transpose(1, 2)
            for projected in self._projections(inputs, encoder_hidden_states)
        )
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for module in self.to_out:
            h = module(h)
        return h

    def _projections(self, inputs: tuple[Tensor, ...], text: Tensor | None) -> tuple[Tensor, ...]:
        if text is not None:
            keys = values = None
            if self.text is not None:
                keys, values = (self.text.group.output(text, at) for at in self.text[1:])
            keys = self.to_k(text) if keys is None else keys
            return self.to_q(inputs[0]), keys, self.to_v(text) if values is None else values
        if len(inputs) == 1:
            return project(self, ("to_q", "to_k", "to_v"), inputs[0])
        return self.to_q(inputs[0]), self.to_k(inputs[1]), self.to_v(inputs[2])


class FusedUNet2DConditionModel(UNet2DConditionModel):
    siblings: dict[str, Group] = {}  # noqa: RUF012  replaced, never changed
    shares_text = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the library's forward; ``encoder_hidden_states`` is its third argument."""
        text = kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[2]
        if args and not torch.is_grad_enabled():
            args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
        with shared_text(self, text):
            return super().forward(*args, **kwargs)


def _norm_silu(norm: nn.GroupNorm, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return group_norm_and_input(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=True, shift=shift)


def _product_and_bias(conv: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a convolution's output without its bias, and the bias; (output, None) unless it is a plain convolution."""
    plain = (
        type(conv) is FrozenConv2d
        and is_unchanged(conv)
        and conv.bias is not None
        and are_frozen(conv.weight, conv.bias)
    )
    return (conv.convolve(x, None), conv.bias) if plain else (conv(x), None)  # type: ignore[operator, return-value]


def _affine(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


# what fits


_GROUP_NORMS = frozenset({nn.GroupNorm, FusedGroupNorm})
_LAYER_NORMS = frozenset({nn.LayerNorm})


def _resnet_fits(module: ResnetBlock2D) -> bool:
    return (
        accepts(ResnetBlock2D.forward, "input_tensor", "temb", "args", "kwargs")
        and has(module, norm1=_GROUP_NORMS, norm2=_GROUP_NORMS, nonlinearity=frozenset({nn.SiLU}))
        and has(module, upsample=None, downsample=None, time_embedding_norm="default", skip_time_act=False)
        and has(module, output_scale_factor=1.0)
        and all(hasattr(module, name) for name in ("conv1", "conv2", "conv_shortcut", "dropout"))
        and getattr(module, "time_emb_proj", None) is not None
    )


def _transformer_fits(module: Transformer2DModel) -> bool:
    method = getattr(Transformer2DModel, "_get_output_for_continuous_inputs", None)
    names = ("hidden_states", "residual", "batch_size", "height", "width", "inner_dim")
    return (
        method is not None
        and accepts(method, *names)
        and has(module, is_input_continuous=True, norm=_GROUP_NORMS)
        and hasattr(module, "proj_out")
        and hasattr(module, "use_linear_projection")
    )


def _block_fits(module: BasicTransformerBlock) -> bool:
    names = (
        "hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "timestep",
        "cross_attention_kwargs", "class_labels", "added_cond_kwargs",
    )  # fmt: skip
    return (
        accepts(BasicTransformerBlock.forward, *names)
        and has(module, norm_type="layer_norm", pos_embed=None, norm1=_LAYER_NORMS, norm2=_LAYER_NORMS)
        and has(module, norm3=_LAYER_NORMS)
        and not hasattr(module, "fuser")
        and all(getattr(module, name, None) is not None for name in ("attn1", "attn2", "ff"))
        and hasattr(module, "only_cross_attention")
        and hasattr(module, "_chunk_size")
    )


def _attention_fits(module: Attention) -> bool:
    return (
        accepts(Attention.forward, "hidden_states", "encoder_hidden_states", "attention_mask", "cross_attention_kwargs")
        and has(module, spatial_norm=None, group_norm=None, norm_cross=None, norm_q=None, norm_k=None)
        and has(module, residual_connection=False, rescale_output_factor=1.0, to_out=frozenset({nn.ModuleList}))
        and has_all(module, "heads", "to_q", "to_k", "to_v", "is_cross_attention")
    )


def _unet_fits(module: UNet2DConditionModel) -> bool:
    names = tuple(inspect.signature(UNet2DConditionModel.forward).parameters)
    # with a projection of the text blocks read another tensor than the network gets
    return names[1:4] == ("sample", "timestep", "encoder_hidden_states") and has(module, encoder_hid_proj=None)


def _conv_fits(module: nn.Conv2d) -> bool:
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and "_conv_forward" not in module.__dict__


#: (class, its fused subclass, which of its modules can be fused); the first that fits is taken
_FUSED: tuple[tuple[type[nn.Module], type[nn.Module], Callable[[Any], bool]], ...] = (
    (nn.GroupNorm, FusedGroupNorm, lambda module: module.affine),
    (nn.Conv2d, FrozenConv2d, _conv_fits),
    (Attention, joint.FusedJointAttention, joint.joint_attention_fits),
    (Attention, complex.FusedQwenAttention, complex.qwen_attention_fits),
    (Attention, complex.FusedZImageAttention, complex.z_image_attention_fits),
    (Attention, FusedAttention, _attention_fits),
    (FluxAttention, joint.FusedFluxAttention, joint.flux_attention_fits),
    (FluxSingleTransformerBlock, joint.FusedFluxSingleTransformerBlock, joint.flux_single_block_fits),
    (GEGLU, FusedGEGLU, lambda module: hasattr(module, "proj")),
    (GELU, feed_forward.FusedGELU, feed_forward.gelu_fits),
    (FeedForward, feed_forward.FusedFeedForward, feed_forward.feed_forward_fits),
    (RMSNorm, FusedRMSNorm, lambda module: has(module, bias=None) and len(module.dim) == 1),
    (ResnetBlock2D, FusedResnetBlock2D, _resnet_fits),
    (Transformer2DModel, FusedTransformer2DModel, _transformer_fits),
    (BasicTransformerBlock, FusedBasicTransformerBlock, _block_fits),
    (UNet2DConditionModel, FusedUNet2DConditionModel, _unet_fits),
)
