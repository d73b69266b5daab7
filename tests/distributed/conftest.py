from __future__ import annotations

from collections.abc import Iterator

import pytest

from placewright.distributed.config import TeamConfig
from placewright.distributed.session import ray_session


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """One Ray for a file of tests, with room for a few workers."""
    with ray_session(TeamConfig(workers=8)):
        yield
