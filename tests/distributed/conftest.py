from __future__ import annotations

from collections.abc import Iterator

import pytest

from placewright.distributed.config import TeamConfig
from placewright.distributed.session import ray_session


@pytest.fixture(scope="package")
def ray() -> Iterator[None]:
    """One Ray for these tests, with room for a few workers."""
    with ray_session(TeamConfig(workers=8, resources={"CPU": 1.0})):
        yield
