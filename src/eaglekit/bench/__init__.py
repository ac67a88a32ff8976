"""Measuring and proving."""
