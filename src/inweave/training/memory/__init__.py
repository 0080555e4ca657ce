"""What a step needs, and how it is fitted into a limit."""
