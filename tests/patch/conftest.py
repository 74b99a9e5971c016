"""Every test starts and ends without a patch."""

import pytest

import doubleback as db


@pytest.fixture(autouse=True)
def stock_afterwards():
    yield
    db.unpatch()
    assert {entry.state for entry in db.patch_report()} <= {"stock", "missing"}
