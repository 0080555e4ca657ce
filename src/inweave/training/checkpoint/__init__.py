"""What is saved of a run, and whether a run may resume from it."""
