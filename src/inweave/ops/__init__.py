"""Mathematics and kernels: one folder an operation."""
