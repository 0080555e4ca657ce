"""Configurations of other trainers, translated into this one's settings; one package per trainer."""
