"""The generated table of derivatives: the patch adds second derivatives and takes none away."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GAINED = {
    "cdist",
    "native_layer_norm",
    "nn.functional.embedding_bag",
    "nn.functional.hardsigmoid",
    "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss",
    "nn.functional.pdist",
}
KEPT = {
    "nn.functional.conv2d",
    "nn.functional.conv_transpose3d",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}


def coverage(monkeypatch):
    pytest.importorskip("expecttest", reason="needs expecttest, which torch's operators import")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    path = ROOT / "benchmarks" / "patch_coverage.py"
    specification = importlib.util.spec_from_file_location("patch_coverage", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_second_derivatives_are_gained_and_kept(monkeypatch):
    rows = {r["operator"]: r for r in coverage(monkeypatch).table(GAINED | KEPT, 4)}
    assert set(rows) >= GAINED | KEPT
    assert all(rows[name]["patched"] and not rows[name]["second"] for name in GAINED)
    assert all(rows[name]["patched"] and rows[name]["second"] for name in KEPT)
    sys.modules.pop("report", None)


def test_the_page_s_numbers_are_those_of_the_table():
    document = json.loads((ROOT / "benchmarks" / "results" / "patch-coverage.json").read_text())
    rows, count = document["results"], document["count"]
    assert not [r for r in rows if r["second"] and not r["patched"]]
    text = (ROOT / "docs" / "patch.md").read_text(encoding="utf-8")
    found = re.search(r"of (\d+) operators .*?, (\d+) have .*? and (\d+) under", text)
    assert tuple(map(int, found.groups())) == tuple(
        count[k] for k in ("first", "second", "patched")
    )
