"""The causal video autoencoder of Wan 2.1 and Qwen-Image: diffusers <-> original names.

Both namings count the encoder's layers alike; the original counts the decoder's in one row, four to a level:

    encoder.down_blocks.i                      encoder.downsamples.i
    decoder.up_blocks.i.resnets.j              decoder.upsamples.(4 i + j)      j = 0, 1, 2
    decoder.up_blocks.i.upsamplers.0           decoder.upsamples.(4 i + 3)
    *.mid_block.resnets.0 / attentions.0 / resnets.1     *.middle.0 / .1 / .2
    quant_conv, post_quant_conv                conv1, conv2
    norm1 conv1 norm2 conv2 conv_shortcut      residual.0 .2 .3 .6, shortcut    inside a residual block
"""

from __future__ import annotations

from inweave.targets.rules import RuleTable


def _residual(part: str, original: str) -> str:
    return f"""
={part}.norm1.gamma    ={original}.residual.0.gamma
{part}.conv1           {original}.residual.2
={part}.norm2.gamma    ={original}.residual.3.gamma
{part}.conv2           {original}.residual.6
{part}.conv_shortcut   {original}.shortcut
"""


def _resampling(part: str, original: str) -> str:
    return f"""
{part}.resample.1   {original}.resample.1
{part}.time_conv    {original}.time_conv
"""


def _half(half: str) -> str:
    """Return the rules that encoder and decoder have in common."""
    mid, middle = f"{half}.mid_block", f"{half}.middle"
    return f"""
{half}.conv_in           {half}.conv1
={half}.norm_out.gamma   ={half}.head.0.gamma
{half}.conv_out          {half}.head.2
={mid}.attentions.0.norm.gamma   ={middle}.1.norm.gamma
{mid}.attentions.0.to_qkv        {middle}.1.to_qkv
{mid}.attentions.0.proj          {middle}.1.proj
{_residual(f"{mid}.resnets.0", f"{middle}.0")}{_residual(f"{mid}.resnets.1", f"{middle}.2")}"""


_DOWN = ("encoder.down_blocks.{i}", "encoder.downsamples.{i}")
_UP = [(f"decoder.up_blocks.{level}.resnets.{n}", f"decoder.upsamples.{4 * level + n}")
       for level in range(4) for n in range(3)]  # fmt: skip
_UPSAMPLERS = [(f"decoder.up_blocks.{level}.upsamplers.0", f"decoder.upsamples.{4 * level + 3}") for level in range(3)]

CAUSAL_VAE = RuleTable(
    "causal-vae",
    lambda: "".join((
        "quant_conv   conv1\npost_quant_conv   conv2\n", _half("encoder"), _half("decoder"),
        _residual(*_DOWN), _resampling(*_DOWN),
        *(_residual(*names) for names in _UP), *(_resampling(*names) for names in _UPSAMPLERS),
    )),
)  # fmt: skip
