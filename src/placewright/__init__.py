"""Placewright finds the device placement that makes a machine-learning graph run fastest."""
