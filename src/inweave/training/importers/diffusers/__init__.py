"""Command lines of diffusers' example scripts."""
