"""Quality of the embedded model as numbers: recall of captions, distance to styles."""
