"""Every test starts from the same random streams."""

import pytest

from support.comparing import seed


@pytest.fixture(autouse=True)
def seeded():
    seed()
