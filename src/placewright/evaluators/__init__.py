"""Evaluators turn placements into measurements."""
