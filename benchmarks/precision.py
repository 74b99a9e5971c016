"""Where a float32 step leaves float64: every node of every sweep, worst first.

    PYTHONPATH=src python benchmarks/precision.py maxvit_t --batch 8 --size 224

A torchvision network is captured once in float32. Its four sweeps run in float32 and, over the same
plan, in float64, on the same numbers; each node's results are compared. A kernel that does not keep
to float32 stands out by the factor between the error of its result and that of its inputs.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import doubleback as db
from doubleback.penalised import program_of


def recorded(model: db.Penalised, x: Tensor, y: Tensor) -> dict[tuple[str, int], list[Tensor]]:
    """Every result of every sweep, by sweep and node."""
    seen: dict[tuple[str, int], list[Tensor]] = {}

    def watch(sweep: str, step, result) -> None:
        key = (sweep, step.node.index)
        parts = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        seen[key] = [t.detach().double() for t in parts if t.is_floating_point()]

    from doubleback import sweeps

    original = sweeps.finite_watch
    sweeps.finite_watch = lambda plan: watch  # type: ignore[assignment]
    try:
        torch.manual_seed(1)
        out, penalty = model(x, y)
        (nn.functional.cross_entropy(out, y) + penalty).backward()
    finally:
        sweeps.finite_watch = original
    seen["penalty", -1] = [penalty.detach().double()]
    return seen


def error(a: Tensor, b: Tensor) -> float:
    scale = float(b.norm())
    return float((a - b).norm()) / scale if scale else float(a.norm() > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("net")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most", type=int, default=25)
    parser.add_argument("--eval", action="store_true")
    arguments = parser.parse_args()
    import torchvision

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    net = torchvision.models.get_model(arguments.net).to(arguments.device)
    net.eval() if arguments.eval else net.train()
    for module in net.modules():
        if type(module).__name__ in ("StochasticDepth", "Dropout"):
            module.p = 0.0  # its draws are others in float64
    x = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device)
    y = torch.randint(10, (arguments.batch,), device=arguments.device)
    wide = copy.deepcopy(net).double()
    narrow_model, wide_model = (
        db.Penalised(n, db.LossGradient("cross_entropy"), debug=True, strict=True)
        for n in (net, wide)
    )
    plan = program_of(narrow_model, x, y)[0].plan
    ours, truth = recorded(narrow_model, x, y), recorded(wide_model, x.double(), y)
    steps = {s.node.index: s for s in plan.steps}
    made = {v: s.node.index for s in plan.steps for v in s.node.outputs}
    errors = {
        key: max((error(a, b) for a, b in zip(parts, truth[key], strict=True)), default=0.0)
        for key, parts in ours.items()
        if key in truth and len(truth[key]) == len(parts)
    }
    print(f"penalty {float(ours['penalty', -1][0]):.6g} in float32, "
          f"{float(truth['penalty', -1][0]):.6g} in float64")  # fmt: skip
    rows = []
    for (sweep, index), own in errors.items():
        if index < 0:
            continue
        node = steps[index].node
        before = [errors.get((sweep, made[v]), 0.0) for v in node.inputs if v in made]
        after = [
            errors.get((sweep, s.node.index), 0.0)
            for s in plan.steps
            if any(v in s.node.inputs for v in node.outputs)
        ]
        source = max(after if sweep in ("backward", "second") else before, default=0.0)
        rows.append((own / max(source, 3e-7), own, sweep, node))
    rows.sort(key=lambda row: -row[0])
    for factor, own, sweep, node in rows[: arguments.most]:
        shapes = [tuple(plan.graph.shape(v)) for v in node.inputs]
        print(f"{factor:9.1f}×  {own:.1e}  {sweep:9} {node.op} {shapes} {node.source[:70]}")
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    print("largest:", [(key, f"{value:.1e}") for key, value in worst])


if __name__ == "__main__":
    main()
