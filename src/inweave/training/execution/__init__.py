"""How a training step runs: CUDA graphs, compiled blocks, kernels, running out of memory."""
