"""Diffusion models from single files: which one a file holds, and everything it needs besides its weights."""
