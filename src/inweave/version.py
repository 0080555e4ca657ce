"""The version, in a module of its own that every tier may import."""

__version__ = "0.1.0"
