"""Targets and draft heads."""
