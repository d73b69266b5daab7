"""Simulates placements: step time, memory, timelines, and bounds no placement can beat."""

from placewright.simulator.bounds import LowerBounds, lower_bounds
from placewright.simulator.engine import Simulation, Simulator
from placewright.simulator.timeline import Timeline

__all__ = ["LowerBounds", "Simulation", "Simulator", "Timeline", "lower_bounds"]
