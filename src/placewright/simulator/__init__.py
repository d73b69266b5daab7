"""Simulates placements: step time, memory, timelines, and bounds no placement can beat."""

from placewright.simulator.bounds import LowerBounds, lower_bounds
from placewright.simulator.engine import Simulation, Simulator
from placewright.simulator.makeup import Makeup, makeup
from placewright.simulator.orders import StepRange, over_orders, shortlisted
from placewright.simulator.timeline import Parts, Timeline

__all__ = [
    "LowerBounds",
    "Makeup",
    "Parts",
    "Simulation",
    "Simulator",
    "StepRange",
    "Timeline",
    "lower_bounds",
    "makeup",
    "over_orders",
    "shortlisted",
]
