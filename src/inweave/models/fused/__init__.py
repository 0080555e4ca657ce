"""diffusers' blocks with fewer passes over memory."""
