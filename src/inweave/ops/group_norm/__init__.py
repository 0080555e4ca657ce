"""Group normalization with frozen scale and shift, and SiLU after it: a plain reference and channels-last kernels."""

from inweave.ops.group_norm.autograd import group_norm, group_norm_and_input

__all__ = ["group_norm", "group_norm_and_input"]
