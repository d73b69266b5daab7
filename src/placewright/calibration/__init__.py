"""Makes the simulator predict this machine: costs and links from measurements.

Three sources, in this order. Op times come from the framework's own trace of whole steps, one for
each kind of device: ops timed alone are 20-40% too fast. Links are timed with chains of real
tensors. What is left (dispatching, packing and unpacking by the cores that compute, how much
devices slow each other down) is fitted to the step times of a few placements.
"""

from placewright.calibration.accuracy import (
    Fidelity,
    check,
    fidelity,
    pair_agreement,
    rank_correlation,
    why_distrusted,
)
from placewright.calibration.costs_file import Calibration
from placewright.calibration.drift import Pace, Timed, in_turns
from placewright.calibration.fitting import Correction, corrected, fit
from placewright.calibration.pieces import (
    LINK_BYTES,
    SPREAD,
    measure_links,
    op_table,
    with_demands,
)
from placewright.calibration.whole import calibrate, varied_placements

__all__ = [
    "LINK_BYTES",
    "SPREAD",
    "Calibration",
    "Correction",
    "Fidelity",
    "Pace",
    "Timed",
    "calibrate",
    "check",
    "corrected",
    "fidelity",
    "fit",
    "in_turns",
    "measure_links",
    "op_table",
    "pair_agreement",
    "rank_correlation",
    "varied_placements",
    "why_distrusted",
    "with_demands",
]
