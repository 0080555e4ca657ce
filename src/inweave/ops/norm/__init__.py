"""Group normalization with frozen scale and shift, and SiLU after it: a plain reference and kernels for channels-last memory."""

from inweave.ops.norm.dispatch import group_norm, group_norm_and_input

__all__ = ["group_norm", "group_norm_and_input"]
