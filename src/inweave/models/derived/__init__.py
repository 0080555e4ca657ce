"""Families that nobody wrote: derived from a diffusers pipeline by running it with its networks intercepted."""
