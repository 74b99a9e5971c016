"""What a gradient penalty costs in eager PyTorch, with and without `db.patch()`.

    PYTHONPATH=src python benchmarks/patch.py --out benchmarks/results/patch-h200.json
    PYTHONPATH=src python benchmarks/patch.py --tiny --device cpu

Parts: `check` (second derivatives on this device against float64), `nets` (price = penalised step /
plain step, stock and patched; and what the patch costs a plain step, before and after the first
create_graph=True registers it), `attention` (second derivative at
long sequences: time and memory), `calls` (microseconds that a replaced operator adds to a
first-order backward) and `convolution` (single layers). The output file is rewritten after every
row; a row that fails says why and the run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import doubleback as db
import measuring
import methods
import patch_check
import patch_nets
from measuring import DTYPES, allow_tf32, gradient_error, hardware, versions

Row = dict[str, Any]
Step = Callable[[], Any]
METHODS = ["plain", "plain patched", "plain armed", "patched", "stock"]
CONTEXTS = {"stock": contextlib.nullcontext, "patched": db.patched}


# ------------------------------------------------------------------------------- measuring


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tidy(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def milliseconds(step: Step, device: str, count: int) -> list[float]:
    """Each of `count` calls; on a GPU by events, so that launches may run ahead as in training."""
    if device == "cpu":
        found = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            found.append((time.perf_counter() - start) * 1e3)
        return found
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def measured(steps: dict[str, tuple[Step, Callable]], chosen, deadline: float) -> dict[str, Row]:
    """Median time and peak memory of each step, in rounds: drift of the machine hits all alike.

    steps: name → (step, context in which it runs). A step that fails has an `error` instead.
    """
    device, rows, samples = chosen.device, {}, {name: [] for name in steps}
    for name, (step, context) in steps.items():
        tidy(device)
        if time.monotonic() > deadline:
            rows[name] = {"error": "not run: budget spent"}
            continue
        try:
            with context():
                step()
                synchronise(device)
                start = time.monotonic()
                step()
                synchronise(device)
                rows[name] = {"estimate_ms": (time.monotonic() - start) * 1e3}
            if device == "cuda":
                rows[name]["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    for _ in range(chosen.rounds):
        for name, (step, context) in steps.items():
            if "error" in rows[name] or (samples[name] and time.monotonic() > deadline):
                continue
            seconds = chosen.cap_seconds / chosen.rounds
            count = max(1, min(20, int(seconds * 1e3 / max(1e-3, rows[name]["estimate_ms"]))))
            with context():
                samples[name] += milliseconds(step, device, count)
    for name, found in samples.items():
        if found:
            rows[name] |= {"ms": statistics.median(found), "samples": len(found)}
            rows[name].pop("estimate_ms")
    return rows


# ------------------------------------------------------------------------------------ nets


def plain_step(entry, net: nn.Module, x: Tensor, y: Tensor) -> Step:
    def step():
        net.zero_grad(set_to_none=True)
        entry.losses(net(x), y).mean().backward()

    return step


def penalised_step(entry, net: nn.Module, x: Tensor, y: Tensor, unfused: bool) -> Step:
    """mean ℓ_i + weight · mean p(‖∂(Σ_j ·)/∂x_i‖), by create_graph=True."""
    attention = methods.math_attention if unfused else contextlib.nullcontext

    def step():
        net.zero_grad(set_to_none=True)
        with attention():
            leaf = x.detach().requires_grad_()
            out = net(leaf)
            losses = entry.losses(out, y)
            total = (out if entry.of_output else losses).sum()
            (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
            norm = gradient.float().flatten(1).square().sum(1).add(1e-12).sqrt()
            (losses.mean() + entry.weight * entry.penalty(norm).mean()).backward()

    return step


@contextlib.contextmanager
def waiting():
    """A process that has called db.patch() and trains in first order: nothing is registered."""
    db.patch()
    try:
        yield
    finally:
        db.unpatch()


def net_row(name: str, dtype: str, layout: str, chosen, deadline: float) -> Row:
    entry = patch_nets.TABLE[name]
    net, x, y = entry.problem(tiny=chosen.tiny, device=chosen.device, dtype=DTYPES[dtype])
    if layout == "channels-last":
        net, x = (t.to(memory_format=torch.channels_last) for t in (net, x))
    plain = plain_step(entry, net, x, y)
    stock = penalised_step(entry, net, x, y, unfused=entry.attention)
    patched = penalised_step(entry, net, x, y, unfused=False)
    steps = {
        "plain": (plain, contextlib.nullcontext),
        "plain patched": (plain, waiting),
        "plain armed": (plain, db.patched),
        "patched": (patched, db.patched),
        "stock": (stock, contextlib.nullcontext),
    }
    steps = {k: v for k, v in steps.items() if k in chosen.methods or k == "plain"}
    row: Row = {"part": "nets", "net": name, "dtype": dtype, "layout": layout, "batch": len(x)}
    row["methods"] = found = measured(steps, chosen, deadline)
    for method in ("stock", "patched", "plain patched", "plain armed"):
        if "ms" in found["plain"] and "ms" in found.get(method, {}):
            row[f"price_{method.replace(' ', '_')}"] = found[method]["ms"] / found["plain"]["ms"]
    if entry.attention:
        row["stock_attention"] = "unfused: the fused kernels have no second derivative"
    if {"stock", "patched"} <= set(steps):
        with contextlib.suppress(Exception):
            row["gradient_difference"] = difference(net, stock, patched)
    return row


def difference(net: nn.Module, stock: Step, patched: Step) -> float:
    """‖patched − stock‖ / ‖stock‖ over all gradients, in the row's own dtype."""

    def gradients(step: Step, context: Callable) -> dict[str, Tensor]:
        with context():
            step()
        return {
            name: p.grad.detach().clone().cpu()
            for name, p in net.named_parameters()
            if p.grad is not None
        }

    expected = gradients(stock, contextlib.nullcontext)
    return gradient_error(gradients(patched, db.patched), expected)[0]


# ------------------------------------------------------------------------------- attention


def attention_row(length: int, dtype: str, chosen, deadline: float) -> Row:
    """First-order backward, and the second derivative in all of q, k, v and ξ."""
    shape = (1, 2, length, 16) if chosen.tiny else (1, 16, length, 64)
    torch.manual_seed(0)
    q, k, v, xi = (
        torch.randn(shape).to(chosen.device, DTYPES[dtype]).requires_grad_() for _ in range(4)
    )
    seeds = [torch.randn_like(t) for t in (q, k, v)]

    def forward():
        return F.scaled_dot_product_attention(q, k, v)

    out = forward()

    def backward():
        return torch.autograd.grad(out, (q, k, v), xi.detach(), retain_graph=True)

    with db.patched():
        grads = torch.autograd.grad(out, (q, k, v), xi, create_graph=True)

    def double():
        return torch.autograd.grad(grads, (q, k, v, xi), seeds, retain_graph=True)

    tidy(chosen.device)
    before = torch.cuda.memory_allocated() / 2**20 if chosen.device == "cuda" else None
    steps = {
        "forward": (forward, torch.no_grad),
        "backward": (backward, contextlib.nullcontext),
        "double backward": (double, db.patched),
    }
    row: Row = {"part": "attention", "length": length, "dtype": dtype, "shape": list(shape)}
    row["methods"] = found = measured(steps, chosen, deadline)
    if all("ms" in r for r in found.values()):
        row["times_backward"] = found["double backward"]["ms"] / found["backward"]["ms"]
    if before is not None and "peak_mib" in found["double backward"]:
        row["extra_mib"] = found["double backward"]["peak_mib"] - before
    return row


# ----------------------------------------------------------------------------------- calls


def calls_rows(chosen, deadline: float) -> list[Row]:
    """Microseconds of one tiny first-order backward: stock; after db.patch(); and once a
    create_graph=True has registered the kernels (armed)."""
    device = chosen.device
    x = torch.randn(2, 4, 4, 4, device=device, requires_grad=True)
    weight = torch.randn(4, 4, 1, 1, device=device, requires_grad=True)
    q = torch.randn(1, 2, 8, 8, device=device, requires_grad=True)
    batch_norm, layer_norm = nn.BatchNorm2d(4, device=device), nn.LayerNorm(4, device=device)
    outputs = {
        "convolution": (F.conv2d(x, weight), [x, weight]),
        "batch norm": (batch_norm(x), [x, *batch_norm.parameters()]),
        "layer norm": (layer_norm(x), [x, *layer_norm.parameters()]),
        "attention": (F.scaled_dot_product_attention(q, q, q), [q]),
    }
    rows = []
    for name, (out, at) in outputs.items():
        seed = torch.ones_like(out)

        def many(out=out, at=at, seed=seed):
            for _ in range(200):
                torch.autograd.grad(out, at, seed, retain_graph=True)
            synchronise(device)

        found = {"stock": [], "patched": [], "armed": []}
        for _ in range(5):
            for key, context in zip(
                found, (contextlib.nullcontext, waiting, db.patched), strict=True
            ):
                with context():
                    many()
                    start = time.perf_counter()
                    many()
                    found[key].append((time.perf_counter() - start) / 200 * 1e6)
        us = {key: min(values) for key, values in found.items()}
        rows.append({"part": "calls", "operator": name, "microseconds": us})
    return rows


# ----------------------------------------------------------------------------- convolution

LAYERS = {  # channels, groups, size, image, batch on a GPU
    "depthwise 3×3": (128, 128, 3, 56, 64),
    "depthwise 7×7": (96, 96, 7, 56, 64),
    "grouped 3×3": (128, 32, 3, 28, 64),
    "dense 3×3": (64, 1, 3, 56, 64),
    "dense 1×1": (128, 1, 1, 28, 64),
}


def convolution_row(name: str, dtype: str, layout: str, chosen, deadline: float) -> Row:
    channels, groups, size, image, batch = LAYERS[name]
    if chosen.device == "cpu":
        channels, groups, batch = channels // 2, max(1, groups // 2), 8
    image, batch = (8, 2) if chosen.tiny else (image, batch)
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, size, padding=size // 2, groups=groups)
    x = torch.randn(batch, channels, image, image)
    form = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    layer = layer.to(chosen.device, DTYPES[dtype]).to(memory_format=form)
    x = x.to(chosen.device, DTYPES[dtype]).contiguous(memory_format=form).requires_grad_()

    def penalised():
        layer.zero_grad(set_to_none=True)
        (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        g.square().sum().backward(inputs=list(layer.parameters()))

    steps = {method: (penalised, context) for method, context in CONTEXTS.items()}
    row: Row = {"part": "convolution", "layer": name, "dtype": dtype, "layout": layout}
    row["methods"] = found = measured(steps, chosen, deadline)
    if all("ms" in r for r in found.values()):
        row["times_faster"] = found["stock"]["ms"] / found["patched"]["ms"]
    return row


# ------------------------------------------------------------------------------------ run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    parts = ["check", "nets", "attention", "calls", "convolution"]
    add("--parts", nargs="+", choices=parts, default=parts)
    add("--nets", nargs="+", choices=patch_nets.TABLE, default=list(patch_nets.TABLE))
    add("--dtypes", nargs="+", choices=DTYPES, help="default: both; CPU: float32")
    add("--layouts", nargs="+", choices=["contiguous", "channels-last"], default=["contiguous"])
    add("--lengths", nargs="+", type=int, help="default: 1024 4096 16384")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    add("--tiny", action="store_true", help="tiny sizes, to try the script")
    add("--rounds", type=int, default=3)
    add("--cap-seconds", type=float, help="timed seconds per method; default 0.6")
    add("--budget-seconds", type=float, default=330.0, help="for the whole run")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="of the nets; plain always")
    add("--combine", nargs="+", type=Path, metavar="JSON", help="merge results; measures nothing")
    add("--no-tuning", action="store_true", help="without cuDNN's search for the fastest kernel")
    add("--out", type=Path)
    chosen = parser.parse_args()
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen.dtypes = chosen.dtypes or (
        ["float32", "bf16"] if chosen.device == "cuda" else ["float32"]
    )
    chosen.lengths = chosen.lengths or ([64, 128] if chosen.tiny else [1024, 4096, 16384])
    chosen.cap_seconds = chosen.cap_seconds or (0.02 if chosen.tiny else 0.6)
    return chosen


def rows_of(chosen, deadline: float):
    """The rows, the cheap ones first; each computed when it is asked for."""
    if "check" in chosen.parts:
        yield from patch_check.rows(chosen.device, {d: DTYPES[d] for d in chosen.dtypes})
    if "calls" in chosen.parts:
        yield from calls_rows(chosen, deadline)
    if "attention" in chosen.parts:
        for dtype in reversed(chosen.dtypes):
            for length in chosen.lengths:
                yield attention_row(length, dtype, chosen, deadline)
    if "convolution" in chosen.parts:
        for layer in LAYERS:
            for layout in ("contiguous", "channels-last"):
                yield convolution_row(layer, chosen.dtypes[-1], layout, chosen, deadline)
    if "nets" in chosen.parts:
        for name in chosen.nets:
            for dtype in chosen.dtypes:
                for layout in chosen.layouts:
                    yield net_row(name, dtype, layout, chosen, deadline)


def show(row: Row) -> None:
    label = " ".join(
        str(row[k])
        for k in ("part", "case", "net", "layer", "operator", "length", "dtype", "layout")
        if k in row
    )
    numbers = {k: float(f"{v:.3g}") for k, v in row.items() if isinstance(v, float)}
    numbers |= {k: v for k, v in row.items() if k in ("suspect", "error") and v}
    times = {
        name: round(r["ms"], 3) if "ms" in r else r["error"][:120]
        for name, r in row.get("methods", {}).items()
    }
    print(label, *(d for d in (times, row.get("microseconds"), numbers) if d), flush=True)


def combine(files: list[Path]) -> dict[str, Any]:
    """One document of several: of rows that are there twice the last counts, and takes methods
    and numbers that it lacks from the earlier ones; rows without a price are no news. Each price
    is of one run, over its own plain."""
    documents = [json.loads(path.read_text()) for path in files]
    rows: dict[tuple, Row] = {}
    labels = ("part", "case", "net", "layer", "operator", "length", "dtype", "layout")
    for document in documents:
        for row in document["results"]:
            key = tuple(row.get(label) for label in labels)
            known = rows.get(key, {})
            failed = "error" in row or any("error" in m for m in row.get("methods", {}).values())
            if known and failed:
                continue
            methods = known.get("methods", {}) | row.get("methods", {})
            rows[key] = known | row | ({"methods": methods} if methods else {})
    commands = "\n".join(dict.fromkeys(document["command"] for document in documents))
    return documents[-1] | {"command": commands, "results": list(rows.values())}


def main() -> int:
    chosen = arguments()
    if chosen.combine:
        measuring.write(chosen.out, combine(chosen.combine))
        return 0
    deadline = time.monotonic() + chosen.budget_seconds
    allow_tf32(True)
    torch.backends.cudnn.benchmark = not chosen.no_tuning
    document: dict[str, Any] = {
        "hardware": hardware(chosen.device),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": measuring.command_line(),
        "tiny": chosen.tiny,
        "results": [],
    }
    for row in rows_of(chosen, deadline):
        document["results"].append(row)
        measuring.write(chosen.out, document)
        show(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
