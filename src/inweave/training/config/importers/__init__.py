"""Configurations of other trainers, translated into settings."""
