"""How many bytes a penalised step must pass over memory, beside a plain one: counted, not timed.

    PYTHONPATH=src python benchmarks/floor.py --nets resnet50 bert --out floor.json

Both steps are traced without numbers into one graph of ATen operators, norms and activations
written out. Then everything that can be fused is taken to be: operators that only pass over memory
cost nothing but what products, sums and later sweeps read and write. What is left are the bytes
that the best compiler would still move, and the operations of the products. A batch norm in
training, for one, passes over 8 tensors in a plain step and over 22 in a penalised one: 3 and 5 for
its value and vjp, then 5 for the tangent and 9 for the second derivatives, whose sums read four
tensors before the same four are read again.

`engine.py` takes the ratio of these bytes for its `floor`, where the file has the network.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import doubleback as db
import nets
from doubleback.kernels import boundary
from doubleback.kernels.launch import for_compiler
from doubleback.run import inductor
from measuring import DTYPES, command_line, versions, write


class Traced(Exception):
    """Carries the graph out of what would compile it."""


def penalised_graph(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.fx.Graph:
    """Of `accumulate`, as it is handed to the compiler."""

    def stop(module: torch.fx.GraphModule, *_: Any) -> None:
        raise Traced(module.graph)

    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True)
    try:
        with mock.patch.object(inductor, "compiled", stop):
            model.accumulate(x, y, loss="cross_entropy", weight=1.0)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Traced):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return cause.args[0]
    raise RuntimeError("nothing was compiled")


def plain_graph(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.fx.Graph:
    """Forward and backward pass of the loss."""
    names = [name for name, _ in net.named_parameters()]

    def step(x: torch.Tensor, y: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        leaves = [p.detach().requires_grad_() for p in parameters]
        out = torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), (x,))
        loss = F.cross_entropy(out, y)
        boundary((loss.detach(),))
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    table = inductor.decompositions()
    given = [x, y, *(p.detach() for p in net.parameters())]
    with for_compiler():
        trace = make_fx(
            step, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True
        )
        return trace(*given).graph


def count(graph: torch.fx.Graph) -> dict[str, float]:
    """Gigabytes of passes, and of products' operands, and the products' operations."""
    cut, sweeps = inductor.shorten(graph, False)
    operations = sum(map(inductor._operations, cut.nodes))
    total = inductor.traffic(cut, sweeps) - operations / inductor.PRODUCT_FLOPS_PER_BYTE
    products = sum(
        inductor._bytes(node) + sum(map(inductor._bytes, set(node.all_input_nodes)))
        for node in cut.nodes
        if inductor._operations(node)
    )
    return {
        "passes_gb": (total - products) / 1e9,
        "products_gb": products / 1e9,
        "tera_operations": operations / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--nets", nargs="+", choices=nets.TABLE, default=list(nets.TABLE))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    document: dict[str, Any] = {
        "command": command_line(), "versions": versions(), "dtype": chosen.dtype,
        "date": datetime.date.today().isoformat(), "rows": [],
    }  # fmt: skip
    for name in chosen.nets:
        net, xs, ys = nets.problem(name, small=False, dtype=DTYPES[chosen.dtype], device="cpu")
        if nets.TABLE[name].layouts:
            net = net.to(memory_format=torch.channels_last)
            xs = [x.contiguous(memory_format=torch.channels_last) for x in xs]
        row: dict[str, Any] = {"net": name}
        with contextlib.suppress(KeyboardInterrupt):
            row["plain"] = count(plain_graph(net, xs[0], ys[0]))
            row["penalised"] = count(penalised_graph(net, xs[0], ys[0]))
            for kind in row["plain"]:
                row[f"{kind.rsplit('_', 1)[0]}_ratio"] = row["penalised"][kind] / row["plain"][kind]
        document["rows"].append(row)
        print(name, {k: round(v, 2) for k, v in row.items() if isinstance(v, float)}, flush=True)
        write(chosen.out, document)


if __name__ == "__main__":
    main()
