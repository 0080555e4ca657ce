"""Code that kernel folders share: operators, gradients, selection, memory layout, precision, an exact exponential."""
