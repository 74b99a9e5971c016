"""What the exact Jacobian penalty costs, against every other way to take the same step.

    PYTHONPATH=src python benchmarks/jacobian.py --out benchmarks/results/jacobian-h200.json
    PYTHONPATH=src python benchmarks/jacobian.py --small --device cpu

One process per network and dtype; the result file is rewritten after each. JAX runs in a process of
its own where it is installed. `peak_mib` is that of CUDA's allocator over two steps (JAX: XLA's
plan), `before_mib` what was allocated before them; `predicted_mib` is the difference that
doubleback's planner foretells.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import jacobian_methods as jm
from measuring import (
    DTYPES,
    allow_tf32,
    evaluate,
    gradient_error,
    hardware,
    peak_memory,
    tidy,
    time_steps,
    versions,
)  # fmt: skip
from timing import plan_repeats, summary

HERE = Path(__file__).parent
JAX_NETS = {
    "conv": ("conv", {"widths": list(jm._WIDE)}),
    "mlp-small": ("mlp", {"hidden": 2}),
    "mlp": ("mlp", {"hidden": 7}),
    "depthwise": ("depthwise", {"widths": list(jm._WIDE)}),
}


def child(args: argparse.Namespace) -> None:
    """Measure one network in one dtype."""
    net_name, dtype_name = args.child.split(",")
    cuda = args.device == "cuda"
    allow_tf32(True)
    torch.backends.cudnn.benchmark = True
    net, xs, ys, weight = jm.problem(net_name, args.small, DTYPES[dtype_name], args.device)
    sets = list(zip(xs, ys, strict=True))
    base = 2 * sum(p.nbytes for p in net.parameters()) / 2**20
    rows: dict[str, dict] = {}
    steps: dict[str, Any] = {}
    expected = reference(net, xs[-1], ys[-1], weight)
    if args.export:
        export(Path(args.export), net, sets, expected)
    deadline = time.monotonic() + args.limit

    def save() -> None:
        facts = {"parameter_and_gradient_mib": base, "rows": rows,
                 "hardware": hardware(args.device), "versions": versions()}  # fmt: skip
        Path(args.result).write_text(json.dumps(facts))

    for name in args.methods:
        row = rows[name] = {"error": None}
        if time.monotonic() > deadline:
            row["error"] = "not run: time limit"
            continue
        try:
            start = time.perf_counter()
            step = jm.METHODS[name](net, *sets[0], weight)
            for pair in (sets * 2)[:4]:  # doubleback flattens its sweeps in the third call
                net.zero_grad(set_to_none=True)
                step(*pair)
            row["first_calls_s"] = time.perf_counter() - start
            found = evaluate(step, net, *sets[-1])
            row["penalty"] = found["penalty"]
            if name not in jm.ESTIMATES and found["penalty"] is not None and expected:
                row["relative_error"], _ = gradient_error(found["gradients"], expected["gradients"])
            del found
            if cuda and "CUDA graph" not in name:
                net.zero_grad(set_to_none=True)
                tidy(cuda)
                row["before_mib"] = torch.cuda.memory_allocated() / 2**20
            row.update(peak_memory(step, net, sets))
            row.update(summary(time_steps(step, net, sets, 3)))
            steps[name] = step
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        tidy(cuda)
        save()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    counts = {n: plan_repeats(rows[n]["ms"], args.repeats, args.cap) for n in steps}
    for _ in range(5):
        for name, step in steps.items():
            count = max(1, counts[name] // 5)
            samples[name] += time_steps(step, net, sets, count)
            rows[name].update(summary(samples[name]))
        save()
    predict(net, xs[0], rows)
    save()


def reference(net, x, y, weight) -> dict | None:
    """Loss, penalty and gradients by the stock loop in float32 without tf32 (float64 on a CPU)."""
    import copy

    allow_tf32(False)
    try:
        dtype = torch.float32 if x.is_cuda else torch.float64
        twin = copy.deepcopy(net).to(dtype)
        few = x.shape[0] and twin(x[:2].to(dtype)).shape[1] <= 16
        method = jm.stock_loop if few else jm.doubleback()
        found = evaluate(method(twin, x.to(dtype), y, weight), twin, x.to(dtype), y)
        found["gradients"] = {name: g.cpu() for name, g in found["gradients"].items()}
        return found
    except Exception as error:
        print(f"no reference: {error}", file=sys.stderr)
        return None
    finally:
        allow_tf32(True)
        tidy(x.is_cuda)


def predict(net, x, rows: dict[str, dict]) -> None:
    """The planner's words for the rows it stands for."""
    import doubleback as db

    chunks = {
        "doubleback": {},
        "doubleback chunk 1": {"chunk": 1},
        "doubleback chunk 2": {"chunk": 2},
    }
    for name, options in chunks.items():
        if name in rows:
            told = db.Penalised(net, db.Jacobian(**options)).explain(x).as_dict()
            rows[name]["plan"] = told["plan"]["chosen"]
            rows[name]["predicted_mib"] = told["peak_bytes"] / 2**20
            rows[name]["flops"] = told["flops"]


def export(folder: Path, net, sets, expected) -> None:
    def arrays(items):
        return {n: (t.float() if t.is_floating_point() else t).detach().cpu().numpy()
                for n, t in items}  # fmt: skip

    np.savez(folder / "parameters.npz", **arrays(net.named_parameters()))
    data = {f"x{i}": x for i, (x, _) in enumerate(sets)}
    data |= {f"y{i}": y for i, (_, y) in enumerate(sets)}
    np.savez(folder / "data.npz", **arrays(data.items()))
    if expected:
        np.savez(folder / "stock_penalised.npz", **arrays(expected["gradients"].items()))


def run_jax(args, folder: Path, net: str, dtype: str) -> list[dict]:
    name, sizes = JAX_NETS[net]
    weight = jm.TABLE[net][3]
    job = {"net": name, "sizes": sizes, "dtype": dtype, "weight": weight, "sets": 2,
           "device": args.device, "repeats": args.repeats, "cap_s": args.cap,
           "methods": ["JAX jit Jacobian"]}  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    command = [args.jax_python, str(HERE / "jax_peer.py"), str(folder)]
    lines, trouble = "", "no result"
    with tempfile.TemporaryFile("w+") as printed:  # what was measured before a time limit counts
        try:
            subprocess.run(command, stdout=printed, timeout=args.jax_limit)
        except subprocess.TimeoutExpired:
            trouble = f"not compiled within {args.jax_limit:.0f} s"
        printed.seek(0)
        lines = printed.read().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    known = [row["method"] for row in found]
    return found + [{"method": m, "error": trouble} for m in job["methods"] if m not in known]


def table(net: str, dtype: str, rows: dict[str, dict]) -> str:
    plain = rows.get("plain", {}).get("ms")
    lines = [f"\n{net} {dtype}", f"{'method':<28}{'ms':>10}{'price':>8}{'MiB':>9}{'error':>10}"]
    for name, row in rows.items():
        if row.get("ms") is None:
            lines.append(f"{name:<28}{row.get('error')}"[:100])
            continue
        price = f"{row['ms'] / plain:.2f}" if plain else ""
        memory = f"{row['peak_mib']:.0f}" if row.get("peak_mib") else ""
        error = f"{row['relative_error']:.1e}" if row.get("relative_error") is not None else ""
        lines.append(f"{name:<28}{row['ms']:>10.3f}{price:>8}{memory:>9}{error:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="reduced sizes, for CPUs")
    parser.add_argument("--nets", nargs="+", default=list(jm.TABLE), choices=list(jm.TABLE))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=list(jm.METHODS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cap", type=float, default=1.5, help="seconds of timing per method")
    parser.add_argument("--limit", type=float, default=120, help="seconds per network and dtype")
    parser.add_argument("--jax-python", default=sys.executable)
    parser.add_argument("--jax-limit", type=float, default=300, help="seconds for JAX")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--out", default=None)
    for hidden in ("--child", "--result", "--export"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    out = Path(args.out or f"jacobian-{args.device}.json")
    typed = [Path(a).name if a == args.out else a for a in sys.argv[1:]]
    facts: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/jacobian.py", *typed]),
                             "date": datetime.date.today().isoformat(), "results": []}  # fmt: skip
    for net in args.nets:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                result = folder / "rows.json"
                methods = [
                    m for m in args.methods
                    if (m != "closed form" or net == "contractive")
                    and ("CUDA graph" not in m or args.device == "cuda")
                    and (m not in jm.ROW_BY_ROW or net not in ("autoencoder", "contractive"))
                    and (m not in jm.COMPILED or args.device == "cuda" or len(args.methods) < 4)
                ]  # fmt: skip
                command = [sys.executable, __file__, "--child", f"{net},{dtype}", "--result",
                           str(result), "--device", args.device, "--repeats", str(args.repeats),
                           "--cap", str(args.cap), "--limit", str(args.limit), "--export", scratch,
                           *(["--small"] if args.small else []), "--methods", *methods]  # fmt: skip
                try:
                    subprocess.run(command, timeout=args.limit + 60, env=os.environ)
                except subprocess.TimeoutExpired:
                    print(f"{net} {dtype}: stopped after {args.limit + 60:.0f} s", file=sys.stderr)
                if not result.exists():
                    continue
                found = json.loads(result.read_text())
                facts |= {"hardware": found.pop("hardware"), "versions": found.pop("versions")}
                if net in JAX_NETS and not args.no_jax and not args.small:
                    for row in run_jax(args, folder, net, dtype):
                        found["rows"][row.pop("method")] = row
                facts["results"].append({"net": net, "dtype": dtype, "small": args.small, **found})
                out.write_text(json.dumps(facts, indent=1) + "\n")
                print(table(net, dtype, found["rows"]), flush=True)


if __name__ == "__main__":
    main()
