"""Other people's networks against stock autograd in float64: `make test-zoo`.

    python tools/zoo.py [--only NAME …] [--limit SECONDS] [--resume] [--json FILE]

Each network of tests/support/families.py runs in a process of its own (support/architectures.py
says what is compared). The file is written anew after each, so that a run that was broken off
goes on with --resume. The exit status is 1 if a result is wrong, or is not had at all.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import platform
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support import architectures, families  # noqa: E402  # pyright: ignore[reportMissingImports]

RESULTS = ROOT / "benchmarks" / "results" / "zoo.json"


def versions() -> dict[str, str]:
    names = ("torch", *(p.replace("_", "-") for p in families.PACKAGES))
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, over all rows and by package."""
    packages: dict[str, Any] = {}
    for package in families.PACKAGES:
        own = [r for r in rows if r["network"].startswith(package + "/")]
        packages[package] = {
            "families": len({r["network"] for r in own}),
            "runs": len(own),
            "captured": sum(r.get("captured", False) for r in own),
            **{verdict: sum(r["verdict"] == verdict for r in own) for verdict in VERDICTS},
        }
    keys = ("families", "runs", "captured", *VERDICTS)
    return {**{k: sum(p[k] for p in packages.values()) for k in keys}, "packages": packages}


VERDICTS = ("agrees", "wrong", "unstable", "raises")


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    words = [Path(w).name if w.endswith(".json") else w for w in sys.argv[1:] if w != "--resume"]
    rows = sorted(rows, key=lambda r: (r["network"], r["mode"]))
    return {
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "tools/zoo.py", *words]),
        **summary(rows),
        "results": rows,
    }


def told(row: dict[str, Any]) -> str:
    mark = "" if row.get("captured", True) else ", not captured"
    text = f"{row['network']} ({row['mode']}): {row['verdict']}{mark}"
    if "worst" in row:
        worst = row["worst"]
        text += (
            f"; {worst['what']} by {worst['way']} in step {worst['step']}: {worst['error']:.1e}, "
            f"allowed {worst['allowed']:.1e}"
        )
    return text + (f"; {row['why']}" if "why" in row else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts of names; default: all")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each network")
    parser.add_argument("--resume", action="store_true", help="keep what the file already has")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for package in families.PACKAGES:  # once, before the processes part
        importlib.import_module(package)
    rows: list[dict[str, Any]] = []
    if chosen.resume and chosen.json and chosen.json.exists():
        rows = json.loads(chosen.json.read_text())["results"]
    done = {r["network"] for r in rows}
    networks = [n for n in families.NETWORKS if n.name not in done]
    if chosen.only:
        named = [n for part in chosen.only for n in networks if part in n.name]
        networks = list({n.name: n for n in named}.values())
    for row in architectures.examine_all(networks, chosen.limit):
        rows.append(row)
        print(told(row), flush=True)
        if chosen.json:
            scratch = chosen.json.with_suffix(".partial")
            scratch.write_text(json.dumps(document(rows), indent=1) + "\n")
            scratch.replace(chosen.json)
    counts = Counter(r["verdict"] for r in rows)
    captured = sum(r.get("captured", False) for r in rows)
    print(f"{len(rows)} runs, {captured} captured; {dict(counts)}")
    return 1 if counts["wrong"] or counts["raises"] else 0


if __name__ == "__main__":
    sys.exit(main())
