"""Tensors apart from mathematics: their bytes in files, shared memory, devices and dtypes by name."""
