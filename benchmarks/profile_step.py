"""Where the time of one training step goes: the top kernels of one or more methods.

    PYTHONPATH=src python benchmarks/profile_step.py --net conv --dtype bf16 \
        --methods plain-compiled doubleback-compiled --json profile.json

Per step: milliseconds on the device, share, launches, kernel. On a CPU: operators by own time.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import measuring
import methods
import nets
from measuring import DTYPES, allow_tf32, hardware, versions

# First match names the family; kernels that match none are 'other'.
FAMILIES = {
    "fused (Inductor)": r"^triton_|cpp_fused|CompiledFxGraph",
    "copy and layout": r"memcpy|memset|copy|nchwToNhwc|nhwcToNchw|transpose|im2col|fill",
    "attention": r"flash|fmha|attention|sdpa|dot_do_o|^(rows|columns)_kernel",
    "convolution": r"conv|fprop|wgrad|dgrad|winograd|depthwise|^apply_kernel",
    "matrix product": r"gemm|gemv|cutlass|cublas|nvjet|matmul|addmm|linear|splitk|mm\b",
    "normalisation": r"batch_norm|layer_norm|bn_|norm_",
    "pooling": r"pool",
    "reduction": r"reduce",
    "element-wise": r"elementwise|vectorized|aten::",
}


def family(kernel: str) -> str:
    for name, pattern in FAMILIES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def kinds(records: list[dict]) -> dict[str, float]:
    """Milliseconds of products, of attention, and of all that passes over memory."""
    names = {"convolution": "products", "matrix product": "products", "attention": "attention"}
    sums = {"products": 0.0, "attention": 0.0, "passes": 0.0}
    for record in records:
        sums[names.get(family(record["kernel"]), "passes")] += record["ms"]
    return {name: round(ms, 3) for name, ms in sums.items()}


def short(kernel: str, width: int = 84) -> str:
    """A kernel's name without return type and argument list, cut to a table's width."""
    name = re.sub(r"^void ", "", kernel)
    name = re.sub(r"at::native::|\(anonymous namespace\)::|cutlass::|c10::", "", name)
    return name if len(name) <= width else name[: width - 1] + "…"


def kernels(step: methods.Step, net, sets: list, steps: int) -> tuple[list[dict], float]:
    """(one record per kernel, most expensive first; wall-clock milliseconds of a step)."""
    cuda = sets[0][0].is_cuda

    def run(count: int) -> None:
        for i in range(count):
            net.zero_grad(set_to_none=True)
            step(*sets[i % len(sets)])
        if cuda:
            torch.cuda.synchronize()

    run(2)
    start = time.perf_counter()
    run(steps)
    wall = (time.perf_counter() - start) * 1e3 / steps
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as recorded:
        run(steps)
    found = []
    for event in recorded.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != cuda:
            continue
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own > 0 and not event.key.startswith("ProfilerStep"):
            found.append(
                {"kernel": event.key, "ms": own / 1e3 / steps, "count": event.count / steps}
            )
    found.sort(key=lambda record: -record["ms"])
    return found, wall


def show(method: str, found: list[dict], wall: float, top: int) -> dict[str, float]:
    """Print the tables; returns milliseconds per family."""
    total = sum(record["ms"] for record in found)
    launches = sum(record["count"] for record in found)
    print(f"\n{method}: {wall:.3f} ms per step, {total:.3f} ms busy, {launches:.0f} launches")
    families: dict[str, float] = {}
    for record in found:
        name = family(record["kernel"])
        families[name] = families.get(name, 0.0) + record["ms"]
    families = dict(sorted(families.items(), key=lambda item: -item[1]))
    print("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in families.items()))
    measuring.print_table(
        ["kernel", "ms", "%", "count"],
        [
            [
                short(record["kernel"]),
                f"{record['ms']:.4f}",
                f"{100 * record['ms'] / total:.1f}",
                f"{record['count']:g}",
            ]
            for record in found[:top]
        ],
    )
    return families


def main() -> None:
    names = {slug: name for slug, name in methods.known().items()}
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="methods: " + ", ".join(names)
    )
    add = parser.add_argument
    add("--net", choices=nets.TABLE, required=True)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--methods", nargs="+", choices=names, metavar="METHOD", default=["doubleback-compiled"])
    add("--small", action="store_true", help="reduced sizes, for CPUs")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    add("--steps", type=int, default=5)
    add("--top", type=int, default=25)
    add("--json", type=Path)
    chosen = parser.parse_args()
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    allow_tf32(True)
    torch.backends.cudnn.benchmark = True
    document: dict[str, Any] = {
        "hardware": hardware(device),
        "versions": versions(),
        "net": chosen.net,
        "dtype": chosen.dtype,
        "methods": {},
    }
    for method in (names[slug] for slug in chosen.methods):
        net, xs, ys = nets.problem(
            chosen.net, small=chosen.small, dtype=DTYPES[chosen.dtype], device=device
        )
        if methods.parse(method)[1]:
            net = net.to(memory_format=torch.channels_last)
            xs = [x.contiguous(memory_format=torch.channels_last) for x in xs]
        sets = list(zip(xs, ys, strict=True))
        try:
            step = methods.build(method, net, *sets[0], nets.TABLE[chosen.net].weight)
            found, wall = kernels(step, net, sets, chosen.steps)
        except Exception as error:
            print(f"\n{method}: {type(error).__name__}: {error}"[:1000])
            document["methods"][method] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        families = show(method, found, wall, chosen.top)
        document["methods"][method] = {"wall_ms": wall, "families": families, "kernels": found}
        measuring.write(chosen.json, document)
    measuring.write(chosen.json, document)


if __name__ == "__main__":
    main()
