"""Diffusion models: families, reading of folders and single files, networks with live weights, samplers."""
