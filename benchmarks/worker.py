"""Measures the PyTorch methods of one network in one dtype; engine.py starts it.

    python benchmarks/worker.py job.json

The job names the network, dtype, methods and limits. The result file is rewritten after every
method, so that whoever ends this process early loses one method at most.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import methods
import nets
from timing import alone, plan_repeats, summary

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 5


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


# --- references and errors ------------------------------------------------------------------------


def evaluate(step: methods.Step, net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
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


def references(
    net: nn.Module, x: Tensor, y: Tensor, weight: float, wanted: Sequence[str]
) -> dict[str, dict]:
    """What plain and penalised steps must give, by autograd, as far as wanted.

    'stock' in the network's own dtype, 'exact' from the same numbers in float64 on a CPU, and in
    float32 without tf32 on a GPU. One that fails (out of memory, say) is left out.
    """
    found = {}
    torch.backends.cudnn.benchmark = False  # one step is not worth a search for the best kernels
    for precision in wanted:
        for kind, method in (("plain", "plain"), ("penalised", "stock")):
            copied, x_copy = net, x
            try:
                if precision == "exact":
                    allow_tf32(False)
                    dtype = torch.float32 if x.is_cuda else torch.float64
                    copied, x_copy = copy.deepcopy(net).to(dtype), x.to(dtype)
                step = methods.build(method, copied, x_copy, y, weight)
                known = evaluate(step, copied, x_copy, y)
                known["gradients"] = {name: g.cpu() for name, g in known["gradients"].items()}
                found[f"{precision}_{kind}"] = known
                del known
            except Exception as error:
                print(f"no {precision} reference for {kind}: {error}", file=sys.stderr)
            finally:
                allow_tf32(True)
            del copied, x_copy
            tidy(x.is_cuda)
    torch.backends.cudnn.benchmark = True
    return found


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


def compare(found: dict, kind: str, known: dict[str, dict]) -> dict[str, float]:
    row = {"loss": found["loss"], "penalty": found["penalty"]}
    for key, precision in (("", "stock"), ("_exact", "exact")):
        expected = known.get(f"{precision}_{kind}")
        if expected is None:
            continue
        error, worst = gradient_error(found["gradients"], expected["gradients"])
        row["relative_error" + key], row["relative_error_worst" + key] = error, worst
        if kind == "penalised":
            row["penalty_error" + key] = abs(found["penalty"] / expected["penalty"] - 1)
    return row


# --- measuring ------------------------------------------------------------------------------------


def tidy(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def time_steps(step: methods.Step, net: nn.Module, sets: list, count: int) -> list[float]:
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


def peak_memory(step: methods.Step, net: nn.Module, sets: list) -> dict[str, float]:
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


class Report:
    """The result file: always whole, always as far as the work has come."""

    def __init__(self, path: Path, **facts: Any):
        self.path = path
        self.facts = {**facts, "current": None, "rows": {}}

    def save(self, current: str | None = None) -> None:
        self.facts["current"] = current
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps(self.facts))
        os.replace(scratch, self.path)

    def row(self, method: str, **values: Any) -> None:
        self.facts["rows"].setdefault(method, {"error": None}).update(values)


@contextlib.contextmanager
def turn(folder: str, workers: int, start_by: float) -> Iterator[None]:
    """Wait until all workers have compiled (or until `start_by`, seconds since the epoch), then
    have the device to oneself: one worker measures at a time."""
    place = Path(folder)
    (place / f"ready-{os.getpid()}").touch()
    while len(list(place.glob("ready-*"))) < workers and time.time() < start_by:
        time.sleep(0.2)
    with alone(place / "turn"):
        yield


@contextlib.contextmanager
def crowded(folder: str) -> Iterator[None]:
    """While others use the device too, nothing is chosen by timing for good: cuDNN chooses anew
    afterwards, since `deterministic` is part of what it keeps its choices under, and Inductor
    times its configurations in one worker at a time."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tune = CachingAutotuner.autotune_to_one_config

    def tune_alone(self, *args, **kwargs):
        with alone(Path(folder) / "tuning"):
            return tune(self, *args, **kwargs)

    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic = False, True
    CachingAutotuner.autotune_to_one_config = tune_alone
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = True, False
        CachingAutotuner.autotune_to_one_config = tune


class Worker:
    def __init__(self, job: dict[str, Any], net: nn.Module, xs: list[Tensor], ys: list[Tensor]):
        self.job = job
        self.deadline = time.monotonic() + job["limit_s"]
        self.cuda = job["device"] == "cuda"
        allow_tf32(True)
        torch.backends.cudnn.benchmark = True
        entry = nets.TABLE[job["net"]]
        self.weight = entry.weight
        device = job["device"]
        self.net = net.to(device)
        self.sets = [(x.to(device), y.to(device)) for x, y in zip(xs, ys, strict=True)]
        self.layouts: dict[bool, tuple[nn.Module, list]] = {False: (self.net, self.sets)}
        self.steps: dict[str, methods.Step] = {}
        parameters = sum(p.nbytes for p in self.net.parameters())
        self.report = Report(
            Path(job["result"]),
            hardware=hardware(job["device"]),
            versions=versions(),
            parameter_and_gradient_mib=2 * parameters / 2**20,
        )

    def layout(self, channels_last: bool) -> tuple[nn.Module, list]:
        if channels_last not in self.layouts:
            net = copy.deepcopy(self.net).to(memory_format=torch.channels_last)
            sets = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in self.sets]
            self.layouts[channels_last] = net, sets
        return self.layouts[channels_last]

    def first_call(self, method: str) -> None:
        """Build the method and take one step: here things are traced and compiled."""
        start = time.perf_counter()
        net, sets = self.layout(methods.parse(method)[1])
        net.zero_grad(set_to_none=True)
        step = methods.build(method, net, *sets[0], self.weight)
        step(*sets[0])
        if self.cuda:
            torch.cuda.synchronize()
        self.report.row(method, first_call_s=time.perf_counter() - start)
        self.steps[method] = step

    def measure(self, method: str, known: dict[str, dict]) -> None:
        base, channels_last, _ = methods.parse(method)
        net, sets = self.layout(channels_last)
        step = self.steps[method]
        kind = "penalised" if base.penalised else "plain"
        step(*sets[0])
        found = evaluate(step, net, *sets[-1])
        self.report.row(method, **compare(found, kind, known))
        del found
        memory = peak_memory(step, net, sets)
        if any(methods.captures(name) for name in self.steps):
            memory.clear()  # a captured graph keeps what it took, its own and everybody's count
        estimate = time_steps(step, net, sets, 3)
        self.report.row(method, **memory, **summary(estimate))

    def guarded(self, method: str, action, *arguments) -> bool:
        self.report.save(current=method)
        try:
            action(method, *arguments)
            return True
        except Exception as error:
            self.steps.pop(method, None)
            text = f"{type(error).__name__}: {error}".strip()
            self.report.row(method, error=text[:2000], ms=None)
            return False
        finally:
            tidy(self.cuda)
            self.report.save()

    def compile_only(self) -> None:
        for method in self.job["methods"]:
            self.guarded(method, self.first_call)

    def run(self) -> None:
        known = references(self.net, *self.sets[-1], self.weight, self.job["references"])
        if self.job["export"]:
            export(Path(self.job["export"]), self.net, self.sets, known)
        spare = 0.2 * self.job["limit_s"]  # kept for the rounds below
        if self.job["turns"]:
            with crowded(self.job["turns"]["folder"]):
                for method in self.job["methods"]:
                    if methods.parse(method)[0].compiled and not methods.captures(method):
                        self.guarded(method, self.first_call)
            with turn(**self.job["turns"]):
                for method in self.job["methods"]:  # cuDNN is tuned on a device of one's own
                    if method in self.steps or self.guarded(method, self.first_call):
                        self.guarded(method, self.measure, known)
                self.rounds()
            return
        for method in self.job["methods"]:
            if time.monotonic() > self.deadline - spare:
                self.report.row(method, error="not run: time limit")
            elif self.guarded(method, self.first_call):
                self.guarded(method, self.measure, known)
        self.rounds()

    def rounds(self) -> None:
        """Time the methods in turn, several times over: drift of the machine hits all alike."""
        rows = self.report.facts["rows"]
        samples: dict[str, list[float]] = {method: [] for method in self.steps}
        counts = {
            method: plan_repeats(rows[method]["ms"], self.job["repeats"], self.job["cap_s"])
            for method in self.steps
        }

        def one_round(method: str) -> None:
            net, sets = self.layout(methods.parse(method)[1])
            count = max(1, round(counts[method] / ROUNDS))
            samples[method] += time_steps(self.steps[method], net, sets, count)
            self.report.row(method, **summary(samples[method]))

        for _ in range(ROUNDS):
            for method in list(self.steps):
                cost = rows[method]["ms"] / 1e3 * (counts[method] / ROUNDS + 1)
                if time.monotonic() + cost < self.deadline - 5:
                    self.guarded(method, one_round)


def export(folder: Path, net: nn.Module, sets: list, known: dict[str, dict]) -> None:
    """Everything jax_peer.py needs, as NumPy arrays in float32."""

    def arrays(tensors) -> dict[str, np.ndarray]:
        return {
            name: (t.float() if t.is_floating_point() else t).detach().cpu().contiguous().numpy()
            for name, t in tensors
        }

    np.savez(folder / "parameters.npz", **arrays(net.named_parameters()))
    np.savez(folder / "buffers.npz", **arrays(net.named_buffers()))
    data = {f"x{i}": x for i, (x, _) in enumerate(sets)}
    data |= {f"y{i}": y for i, (_, y) in enumerate(sets)}
    np.savez(folder / "data.npz", **arrays(data.items()))
    for name, reference in known.items():
        np.savez(folder / f"{name}.npz", **arrays(reference["gradients"].items()))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import doubleback  # noqa: F401  before the gate, as everything that needs no device

    net, xs, ys = nets.problem(job["net"], small=job["small"], dtype=DTYPES[job["dtype"]])
    with alone(job["gate"]):
        Path(job["begun"]).touch()
        worker = Worker(job, net, xs, ys)
        if job["compile_only"]:
            worker.compile_only()
        else:
            worker.run()
        worker.report.save()


if __name__ == "__main__":
    main()
