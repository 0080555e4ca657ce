"""Whole files in, whole files out: bake, extract, resize."""
