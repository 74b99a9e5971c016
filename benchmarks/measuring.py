"""What all measured processes share: the machine, one step's gradients, times and memory, tables,
JSON files."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timing import alone

Step = Any  # step(x, y) → (loss, penalty or None), gradients left in the parameters
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def allow_tf32(allow: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.backends.cudnn.allow_tf32 = allow


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    return f"{model}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    triton = None
    with contextlib.suppress(ImportError):
        import triton as installed

        triton = installed.__version__
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version() or "") or None,
        "triton": triton,
        "python": platform.python_version(),
    }


def evaluate(step: Step, net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Loss, penalty and gradients of one step."""
    net.zero_grad(set_to_none=True)
    loss, penalty = step(x, y)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach()
        for name, p in net.named_parameters()
    }
    net.zero_grad(set_to_none=True)
    return {
        "loss": float(loss),
        "penalty": None if penalty is None else float(penalty),
        "gradients": gradients,
    }


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """‖g − r‖/‖r‖ over all parameters together, and the worst single parameter's.

    A parameter whose gradient vanishes is judged against a thousandth of the whole norm.
    """
    apart, size = {}, {}
    for name, gradient in found.items():
        reference = expected[name].to(gradient.device, torch.float64)
        apart[name] = float((gradient.double() - reference).norm())
        size[name] = float(reference.norm())
    whole = sum(s * s for s in size.values()) ** 0.5
    error = sum(a * a for a in apart.values()) ** 0.5 / whole
    return error, max(apart[name] / max(size[name], 1e-3 * whole) for name in apart)


def tidy(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def time_steps(step: Step, net: nn.Module, sets: list, count: int) -> list[float]:
    """Milliseconds of each of `count` steps, after one that is not timed."""
    cuda = sets[0][0].is_cuda
    gc.collect()
    gc.disable()
    try:
        net.zero_grad(set_to_none=True)
        step(*sets[-1])
        if cuda:
            pairs = []
            torch.cuda.synchronize()
            for i in range(count):
                net.zero_grad(set_to_none=True)
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                step(*sets[i % len(sets)])
                end.record()
                pairs.append((start, end))
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        samples = []
        for i in range(count):
            net.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            step(*sets[i % len(sets)])
            samples.append((time.perf_counter() - begin) * 1e3)
        return samples
    finally:
        gc.enable()
        net.zero_grad(set_to_none=True)


def peak_memory(step: Step, net: nn.Module, sets: list) -> dict[str, float]:
    """Most bytes allocated, and held from the device, during two steps."""
    if not sets[0][0].is_cuda:
        return {}
    net.zero_grad(set_to_none=True)
    tidy(cuda=True)
    torch.cuda.reset_peak_memory_stats()
    for x, y in sets[:2]:
        net.zero_grad(set_to_none=True)
        step(x, y)
    torch.cuda.synchronize()
    return {
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
    }


@contextlib.contextmanager
def crowded(gate: Path) -> Iterator[None]:
    """While others use the device too, Inductor times its configurations in one process at a time,
    and cuDNN chooses anew afterwards: it keeps its choices by `deterministic`, among others."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tune = CachingAutotuner.autotune_to_one_config

    def tune_alone(self, *args, **kwargs):
        with alone(gate):
            return tune(self, *args, **kwargs)

    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic = False, True
    CachingAutotuner.autotune_to_one_config = tune_alone
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = True, False
        CachingAutotuner.autotune_to_one_config = tune


def command_line() -> str:
    """The command as others would type it: without the folders of this machine, and without what
    was shared with benchmarks that ran meanwhile."""
    script, *words = sys.argv
    if "--gates" in words[:-1]:
        at = words.index("--gates")
        del words[at : at + 2]
    if "--out" in words[:-1]:
        at = words.index("--out") + 1
        words[at] = Path(words[at]).name
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *words])


def write(path: Path | None, document: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(scratch, path)


def print_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """With rich where it is installed, else in aligned plain text."""
    lines = [list(map(str, line)) for line in lines]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        for line in [list(heads), *lines]:
            first, *rest = (
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            print("  ".join([first, *rest]))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console = Console(width=sum(max(map(len, c)) + 3 for c in zip(heads, *lines, strict=True)))
    console.print(table)
