"""Validation and memory planning of training runs, in a separate process."""
