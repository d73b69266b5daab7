from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run the tests are shared: examples may take any time.
settings.register_profile(
    "placewright",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("placewright")
