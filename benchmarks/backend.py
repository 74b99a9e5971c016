"""`torch.compile(net, backend="doubleback")` beside stock: training without derivatives in the
loss, where it should cost what `torch.compile` does, and with a gradient penalty.

    PYTHONPATH=src python benchmarks/backend.py --device cuda --out backend.json

All methods of a network run in one process, interleaved step by step. Written down: medians and
quartiles of the step, the first calls, peak memory, and the gradient's error against float64.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db


def mlp(tiny: bool) -> tuple[nn.Module, Tensor]:
    width, depth = (32, 3) if tiny else (1024, 6)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.SiLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)), torch.randn(8 if tiny else 2048, width)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def convolutional(tiny: bool) -> tuple[nn.Module, Tensor]:
    width = 4 if tiny else 64
    net = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(Residual(width) for _ in range(1 if tiny else 4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1),
    )  # fmt: skip
    return net, torch.randn(2 if tiny else 64, 3, 32, 32)


class Tokens(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout, F.gelu, batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for block in self.body.layers:  # attention's own dropout is fused with it
            block.self_attn.dropout = 0.0  # type: ignore[union-attr]
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def transformer(tiny: bool, dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    width, layers, batch, length = (32, 1, 2, 8) if tiny else (512, 4, 32, 128)
    return Tokens(width, layers, dropout), torch.randn(batch, length, width)


NETS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "convolutions and batch norm": convolutional,
    "transformer": transformer,
    "transformer with dropout": lambda tiny: transformer(tiny, 0.1),
}


def plain(fn: Callable, x: Tensor) -> Tensor:
    return fn(x).square().mean()


def penalised(fn: Callable, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = fn(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + g.square().flatten(1).sum(1).mean()


def by_products(net: nn.Module) -> Callable:
    """Attention by PyTorch's formula that has a second derivative."""

    def run(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return net(x)

    return run


# Of each loss: how the network is called.
METHODS: dict[str, tuple[Callable, dict[str, Callable]]] = {
    "plain": (
        plain,
        {
            "eager": lambda net: net,
            "torch.compile": lambda net: torch.compile(net, dynamic=False),
            "backend": lambda net: torch.compile(net, backend="doubleback", dynamic=False),
        },
    ),
    "penalty": (
        penalised,
        {
            "eager": by_products,
            "backend": lambda net: torch.compile(net, backend="doubleback", dynamic=False),
        },
    ),
}


def timed(step: Callable[[], Tensor], net: nn.Module, device: str) -> float:
    net.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, loss: str, arguments: argparse.Namespace) -> list[dict]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = NETS[name](arguments.tiny)
    net, x = net.to(arguments.device), x.to(arguments.device)
    run, methods = METHODS[loss]
    steps: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {}
    rows: dict[str, dict] = {}
    for method, make in methods.items():
        own = copy.deepcopy(net)
        fn = make(own)

        def step(fn: Callable = fn) -> Tensor:
            return run(fn, x)

        row = {"net": name, "loss": loss, "method": method}
        try:
            row["first_calls_ms"] = [round(timed(step, own, arguments.device)) for _ in range(4)]
        except Exception as problem:
            rows[method] = {**row, "failed": f"{type(problem).__name__}: {problem}"[:300]}
            continue
        if "dropout" not in name:
            row["gradient_error"] = _error(own, net, run, x)
        steps[method], rows[method] = (own, step), row
    times: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(arguments.steps):
        order = list(steps.items())[:: 1 if i % 2 else -1]
        for method, (own, step) in order:
            times[method].append(timed(step, own, arguments.device))
    for method, (own, step) in steps.items():
        low, middle, high = statistics.quantiles(times[method], n=4)
        rows[method].update(
            median_ms=round(middle, 4), quartiles_ms=[round(low, 4), round(high, 4)]
        )
        if arguments.device == "cuda":
            own.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            timed(step, own, arguments.device)
            peak = torch.cuda.max_memory_allocated() - before
            rows[method]["peak_mib"] = round(peak / 2**20, 1)
            own.zero_grad(set_to_none=True)
    base = rows["torch.compile" if loss == "plain" else "eager"].get("median_ms")
    for row in rows.values():
        if base and "median_ms" in row:
            row["over_base"] = round(row["median_ms"] / base, 3)
            print(f"{name:28} {loss:8} {row['method']:14} {row['median_ms']:10.3f} ms  "
                  f"{row['over_base']:6.3f}", flush=True)  # fmt: skip
        elif "failed" in row:
            print(f"{name:28} {loss:8} {row['method']:14} {row['failed']}", file=sys.stderr)
    return list(rows.values())


def _error(own: nn.Module, net: nn.Module, run: Callable, x: Tensor) -> float:
    """‖gradient − float64's‖ / ‖float64's‖, of the last step."""
    wide = copy.deepcopy(net).double()
    run(by_products(wide), x.double()).backward()
    pairs = [
        (p.grad.double(), q.grad)
        for p, q in zip(own.parameters(), wide.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return (off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="small enough for a quick look")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--losses", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "backend.py: there is no CUDA device here\n")
    rows = [row for n in arguments.nets for loss in arguments.losses
            for row in measure(n, loss, arguments)]  # fmt: skip
    cuda = arguments.device == "cuda"
    result = {
        "command": "PYTHONPATH=src python benchmarks/backend.py " + " ".join(sys.argv[1:]),
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "torch": torch.__version__,
        "doubleback": db.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
