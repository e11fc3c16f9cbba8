"""Measurements; each writes a results file."""
