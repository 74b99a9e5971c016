"""Which operators PyTorch differentiates once, twice, and twice under `db.patch()`.

    PYTHONPATH=src python benchmarks/patch_coverage.py --samples 24 \
        --out benchmarks/results/patch-coverage.json

Every operator of PyTorch's own database of samples (torch.testing, needs `expecttest`), in float64
on the CPU. An operator has a derivative when every sample has one. The exit status is 1 if an
operator has a second derivative in stock PyTorch and none under the patch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

import doubleback as db
import measuring

LARGEST = 20_000  # entries of a sample's inputs


def differentiable(values: Any) -> list[Tensor]:
    flat = _pytree.tree_leaves(values)
    return [t for t in flat if isinstance(t, Tensor) and t.requires_grad]


def samples(op: Any, count: int) -> Iterator[tuple[Callable, list[Tensor]]]:
    """The first `count` samples that are not large: a function of nothing, and its inputs."""
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        inputs = differentiable((sample.input, sample.args, sample.kwargs))
        if inputs and sum(t.numel() for t in inputs) <= LARGEST and count > 0:
            count -= 1
            call = (sample.input, *sample.args), sample.kwargs
            yield (lambda c=call: op.gradcheck_wrapper(op.get_op(), *c[0], **c[1])), inputs


def has_derivative(function: Callable, inputs: list[Tensor], order: int) -> bool:
    """Whether reverse mode of this order runs, in everything that it depends on."""
    try:
        outputs, at = differentiable(function()), list(inputs)
        for n in range(order):
            cotangents = [torch.ones_like(t).requires_grad_() for t in outputs]
            if not outputs:
                return n > 0
            grads = torch.autograd.grad(
                outputs, at, cotangents, create_graph=n + 1 < order, allow_unused=True
            )
            at = [*inputs, *cotangents]
            outputs = [g for g in grads if g is not None and g.requires_grad]
    except RuntimeError:  # NotImplementedError among them
        return False
    return True


def row(op: Any, count: int) -> dict[str, Any] | None:
    """None for an operator without a first derivative; samples without one do not count."""
    found = {"first": True, "second": True, "patched": True}
    seen = 0
    for function, inputs in samples(op, count):
        if not has_derivative(function, inputs, 1):
            continue
        found["second"] &= has_derivative(function, inputs, 2)
        with db.patched():
            found["patched"] &= has_derivative(function, inputs, 2)
        seen += 1
    return {"operator": op.full_name, **found, "samples": seen} if seen else None


def table(names: set[str] | None = None, count: int = 6) -> list[dict[str, Any]]:
    """One row per operator that PyTorch can differentiate once; of `names`, or of all."""
    from torch.testing._internal.common_methods_invocations import op_db

    rows = []
    for op in op_db:
        if names is not None and op.name not in names:
            continue
        if not op.supports_autograd or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        # some operators cannot draw their samples on a CPU: they have no row
        with warnings.catch_warnings(), contextlib.suppress(NotImplementedError):
            warnings.simplefilter("ignore")
            rows.append(row(op, count))
    return [r for r in rows if r is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", help="default: all")
    parser.add_argument("--samples", type=int, default=6, help="of each operator")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = table(None if chosen.operators is None else set(chosen.operators), chosen.samples)
    lost = [r["operator"] for r in rows if r["second"] and not r["patched"]]
    count = {key: sum(r[key] for r in rows) for key in ("first", "second", "patched")}
    words = [Path(w).name if w.endswith(".json") else w for w in sys.argv[1:]]
    command = shlex.join(["python", "benchmarks/patch_coverage.py", *words])
    differing = [r for r in rows if not r["second"] or not r["patched"]]
    document = {
        "versions": {"torch": torch.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "samples": chosen.samples,
        "count": count,
        "results": differing,
        "second_in_both": " ".join(r["operator"] for r in rows if r["second"] and r["patched"]),
    }
    measuring.write(chosen.out, document)
    marks = [[r["operator"], *("–✓"[r[k]] for k in count)] for r in differing]
    measuring.print_table(
        ["operator", "first", "second in stock", "second under db.patch()"], marks
    )
    print(f"all operators: {count}")
    if lost:
        print(f"lost under the patch: {', '.join(lost)}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
