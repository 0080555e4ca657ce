"""The memory of a step, and how a run is fitted into a limit."""
