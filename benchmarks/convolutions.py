"""K, Kᵀ and K□ of single convolutions: PyTorch's kernels, channels-last, and those of doubleback.

    PYTHONPATH=src python benchmarks/convolutions.py --out convolutions.json

Microseconds on the device, each operator many times in one CUDA graph; beside them the largest
difference, relative to PyTorch's largest entry, and the time in which memory could move both images
once. The tables of kernels/products.py and kernels/depthwise.py are made of these. `--device cpu`
takes small layers, and PyTorch's kernels on both sides: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubleback.operators import Convolution
from measuring import DTYPES, allow_tf32, hardware, print_table, versions

aten = torch.ops.aten
BANDWIDTH = 4.2e12  # bytes per second that an H200 moves


class Layer(NamedTuple):
    batch: int
    channels: int
    after: int
    size: int
    kernel: int
    stride: int
    padding: int
    groups: int

    @property
    def operator(self) -> Convolution:
        stride, padding = (self.stride,) * 2, (self.padding,) * 2
        return Convolution(stride, padding, (1, 1), groups=self.groups)

    def __str__(self) -> str:
        kind = "depthwise " if self.groups > 1 else ""
        return (
            f"{kind}{self.kernel}×{self.kernel}/{self.stride}, {self.channels} → {self.after}, "
            f"{self.size}², batch {self.batch}"
        )


def depthwise(batch: int, channels: int, size: int, kernel: int, stride: int = 1) -> Layer:
    return Layer(batch, channels, channels, size, kernel, stride, kernel // 2, channels)


LAYERS = [
    Layer(128, 3, 64, 224, 7, 2, 3, 1),
    Layer(64, 3, 64, 224, 11, 4, 2, 1),
    Layer(64, 3, 32, 224, 3, 2, 1, 1),
    Layer(64, 3, 384, 224, 16, 16, 0, 1),
    Layer(64, 3, 96, 224, 4, 4, 0, 1),
    Layer(64, 96, 192, 56, 2, 2, 0, 1),
    *(depthwise(64, 96 * 2**i, 56 // 2**i, 7) for i in range(4)),
    depthwise(64, 144, 56, 5, 2),
    depthwise(512, 64, 32, 3),
    depthwise(512, 64, 32, 3, 2),
    depthwise(512, 128, 16, 3),
    depthwise(512, 128, 16, 3, 2),
    depthwise(512, 256, 8, 3),
]


def microseconds(call: Callable[[], Any], cuda: bool, repeats: int = 20) -> float:
    for _ in range(3):
        call()
    if not cuda:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@torch.no_grad()
def measure(layer: Layer, dtype: torch.dtype, device: str) -> dict[str, Any]:
    like = {"dtype": dtype, "device": device}
    last = torch.channels_last
    x = torch.randn(layer.batch, layer.channels, layer.size, layer.size, **like)
    shape = (layer.after, layer.channels // layer.groups, layer.kernel, layer.kernel)
    x, weight = x.contiguous(memory_format=last), torch.randn(shape, **like)
    weight = weight.contiguous(memory_format=last)
    K = layer.operator
    options = (K.stride, K.padding, K.dilation, False, (0, 0), K.groups)
    y = aten.convolution(x, weight, None, *options)
    xi = torch.randn_like(y)

    def stock(*mask: bool) -> Tensor:
        grads = aten.convolution_backward(xi, x, weight, None, *options, list(mask))
        return next(g for g, wanted in zip(grads, mask, strict=True) if wanted)

    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "K": (
            lambda: aten.convolution(x, weight, None, *options),
            lambda: K.forward(weight, x),
        ),
        "Kᵀ": (
            lambda: stock(True, False, False),
            lambda: K.transpose(weight, xi, x.shape, x),
        ),
        "K□": (
            lambda: stock(False, True, False),
            lambda: K.weight_adjoint(x, xi, shape),
        ),
    }
    row: dict[str, Any] = {"layer": str(layer), "dtype": str(dtype).removeprefix("torch.")}
    row["memory_us"] = (x.nbytes + y.nbytes) / BANDWIDTH * 1e6
    for name, (theirs, ours) in pairs.items():
        row[name] = {
            "stock_us": microseconds(theirs, x.is_cuda),
            "us": microseconds(ours, x.is_cuda),
            "difference": apart(ours(), theirs()),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "float32"])
    parser.add_argument("--out", type=Path, help="JSON file")
    chosen = parser.parse_args()
    allow_tf32(True)
    layers = LAYERS
    if chosen.device == "cpu":
        layers = [layer._replace(batch=2, size=max(16, layer.size // 8)) for layer in LAYERS]
    rows = [
        measure(layer, DTYPES[name], chosen.device) for name in chosen.dtypes for layer in layers
    ]
    parts = ("K", "Kᵀ", "K□")
    lines = [
        [f"{row['dtype']}, {row['layer']}"]
        + [f"{row[p]['stock_us']:.0f} / {row[p]['us']:.0f}" for p in parts]
        + [f"{row['memory_us']:.0f}", f"{max(row[p]['difference'] for p in parts):.0e}"]
        for row in rows
    ]
    print_table(["PyTorch / here, µs", *parts, "memory", "difference"], lines)
    if chosen.out:
        document = {"hardware": hardware(chosen.device), "versions": versions()}
        document |= {"date": time.strftime("%Y-%m-%d"), "results": rows}
        chosen.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
