"""Runners execute a graph under a placement on real devices, in processes of their own."""
