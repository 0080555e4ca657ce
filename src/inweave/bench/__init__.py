"""Figures: speed and memory beside other libraries and the hardware's limits; quality of the embedded model."""
