"""Every test starts from the same random streams."""

import pytest
from compare import seed


@pytest.fixture(autouse=True)
def seeded():
    seed()
