"""PyTorch's own operators, each as a network of its own, against stock autograd: `make
test-operators`.

    python tools/operators.py [--only NAME …] [--samples N] [--resume] [--json FILE]

Of every operator in PyTorch's database (torch.testing, needs `expecttest`) that has a derivative in
float64 on a CPU: its second derivatives under `Penalised` and under `db.patch()`, compared as
tests/support/one_operator.py says, in a process of its own. What is not had needs a reason in
`REASONS` there, and what has a reason must not be had. The exit status is 1 if anything is wrong,
unexplained, or explained although it works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support import one_operator  # noqa: E402  # pyright: ignore[reportMissingImports]

RESULTS = ROOT / "benchmarks" / "results" / "operators.json"


def document(rows: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    words = [Path(w).name if w.endswith(".json") else w for w in sys.argv[1:] if w != "--resume"]
    plain = [r for r in rows if one_operator.as_expected(r)]
    return {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "tools/operators.py", *words]),
        "samples": samples,
        "count": one_operator.count(rows),
        "results": [
            {**r, "reasons": one_operator.reasons(r)}
            for r in rows
            if not one_operator.as_expected(r)
        ],
        "swept_and_patched": " ".join(r["operator"] for r in plain),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", help="full names; default: all")
    parser.add_argument("--samples", type=int, default=2, help="of each operator")
    parser.add_argument("--resume", action="store_true", help="go on with a run broken off")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    log = chosen.json.with_suffix(".partial") if chosen.json else None  # a row a line
    rows: list[dict[str, Any]] = []
    if chosen.resume and log and log.exists():
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    done = {r["operator"] for r in rows}
    names = [n for n in chosen.only or one_operator.operators() if n not in done]
    for row in one_operator.examine_all(names, count=chosen.samples):
        rows.append(row)
        if log:
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if not one_operator.as_expected(row):
            print(json.dumps(row), flush=True)
    faults = [fault for row in rows for fault in one_operator.faults(row)]
    print("\n".join(faults))
    print(one_operator.count(rows))
    if chosen.json and log:
        chosen.json.write_text(json.dumps(document(rows, chosen.samples), indent=1) + "\n")
        log.unlink()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
