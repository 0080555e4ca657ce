"""Mathematics and kernels: one folder per operation."""
