"""Layer and RMS normalization with frozen weights, with the residual sum before them: a plain reference and kernels."""

from inweave.ops.row_norm.autograd import add_layer_norm, layer_norm_and_input, rms_norm

__all__ = ["add_layer_norm", "layer_norm_and_input", "rms_norm"]
