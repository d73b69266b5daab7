from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# pytest's importlib mode does not put test folders on the path; `strategies` is shared.
sys.path.insert(0, str(Path(__file__).parent))

# Machines that run the tests are shared: examples may take any time.
settings.register_profile(
    "placewright",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("placewright")
