"""Validation and memory planning of training runs, in a process of its own."""
