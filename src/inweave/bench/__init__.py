"""Measuring what adapters and models do."""
