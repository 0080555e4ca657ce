"""Flat parameters, optimizers, schedules, EMA, loss scaling."""
