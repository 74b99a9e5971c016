"""Where a patched step's time goes on a GPU: its length, how long kernels ran, how many there were,
and the longest of them. A step much longer than its kernels waits for the host.

PYTHONPATH=src python benchmarks/patch_profile.py resnet50 mobilenetv2 --dtype bf16
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

import doubleback as db
from measuring import DTYPES, allow_tf32
from patch import milliseconds, penalised_step, plain_step
from patch_nets import TABLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("nets", nargs="+", choices=list(TABLE))
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--top", type=int, default=16)
    chosen = parser.parse_args()
    allow_tf32(True)
    torch.backends.cudnn.benchmark = True
    for name in chosen.nets:
        entry = TABLE[name]
        net, x, y = entry.problem(tiny=False, device="cuda", dtype=DTYPES[chosen.dtype])
        steps = {
            "plain": plain_step(entry, net, x, y),
            "patched": penalised_step(entry, net, x, y, unfused=False),
        }
        for method, step in steps.items():
            with db.patched():
                for _ in range(3):
                    step()
                length = statistics.median(milliseconds(step, "cuda", 8))
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
                    step()
                    torch.cuda.synchronize()
            rows = [e for e in prof.key_averages() if e.device_type.name == "CUDA"]
            rows.sort(key=lambda e: -e.self_device_time_total)
            total = sum(e.self_device_time_total for e in rows)
            count = sum(e.count for e in rows)
            print(
                f"\n{name} {chosen.dtype} {method}: {total / 1e3:.2f} ms of kernels in a step of "
                f"{length:.1f} ms, {count} launches"
            )
            for e in rows[: chosen.top]:
                print(f"{e.self_device_time_total / 1e3:8.3f} ms {e.count:5d}×  {e.key[:100]}")
        del net, x, y, steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
