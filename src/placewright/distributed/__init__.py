"""Searching with many processes, on one machine or several, through Ray.

Only this package imports Ray, and it is imported only where workers are asked for.
"""
