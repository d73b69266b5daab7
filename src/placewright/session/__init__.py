"""A search, from what was asked for to what was found.

references -> calibration -> search -> rounds of measuring and correcting -> final

`Session` drives all of that; `placewright.place` and the command line both build one.
"""
