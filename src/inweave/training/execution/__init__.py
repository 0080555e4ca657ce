"""How a training step runs: recorded as CUDA graphs, compiled, with which kernels."""
