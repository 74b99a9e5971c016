"""Every test starts and ends without a patch."""

import pytest

import doubleback as db
from doubleback.patch import mechanism


@pytest.fixture(autouse=True)
def stock_afterwards(monkeypatch, request):
    if request.node.get_closest_marker("choice") is None:  # formulas, on tensors of any size
        monkeypatch.setattr(mechanism, "SMALL_ON_STOCK", False)
    yield
    db.unpatch()
    assert {entry.state for entry in db.patch_report()} <= {"stock", "missing"}
