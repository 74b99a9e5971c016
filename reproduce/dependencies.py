"""Figure 1: which quantity is a function of which, read off the captured network.

A product z = K(θ, x) + b gives the edges θ, x, b → z forward and θ, ζ → ξ backward, since
ξ = Kᵀ(θ, ζ); an activation x = g(z) gives z → x forward and z, ξ → ζ backward, since ζ = g′(z)⊙ξ.
The derivative of R in a parameter needs every path from that parameter to R.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from doubleback.landscape import Network, drawing

from .experiment import Checked, Experiment

Edges = dict[str, set[str]]  # name → what it is a direct function of


def draw(experiment: Experiment) -> Checked:
    report = Checked(
        "figure-1-dependencies",
        "Figure 1: the dependency graph of a penalised network",
        "Every quantity of the captured 1–8–5–1 network and of its backward sweep; an arrow points "
        "to a direct function of where it starts. Values above, cotangents below, parameters "
        "between. The last activation is the identity, so that x_L = z_L and ζ_L = v. Dashed: v is "
        "constant for R_node and ∇ℓ(z_L) for R_cdb.",
    )
    edges, columns = dependencies(experiment.paths["w"].network)
    check(experiment, report, edges)
    report.figure = _figure(edges, columns)
    rows = [(name, ", ".join(sorted(edges[name]))) for name in sorted(edges)]
    report.tables.append(
        drawing.Table("Direct dependencies", ("quantity", "is a function of"), rows)
    )
    report.numbers = {"edges": {name: sorted(found) for name, found in edges.items()}}
    return report


def dependencies(network: Network) -> tuple[Edges, list[str]]:
    """Direct dependencies for a constant v, and the values x₀, z₁, x₁ … from input to output."""
    names, edges = {network.x: "x0"}, {}
    value = {v: name for name, v in network.names.items()}
    dual = {"x0": "ξ0"}
    columns, layer = ["x0"], 0
    for node in network.nodes:
        kind = network.rules[node.index].structure.value
        (x,) = [v for v in node.inputs if v in names]
        if kind == "bilinear":
            layer += 1
            own = {v: f"{'θ' if value[v].endswith('weight') else 'b'}{layer}"
                   for v in node.inputs if v != x}  # fmt: skip
            out, cotangent = f"z{layer}", f"ζ{layer}"
            edges[out] = {names[x], *own.values()}
            edges[dual[names[x]]] = {cotangent, f"θ{layer}"}
        else:  # coordinate-wise
            out, cotangent = f"x{layer}", f"ξ{layer}"
            edges[out] = {names[x]}
            edges[dual[names[x]]] = {cotangent, names[x]}
        names[node.outputs[0]] = out
        dual[out] = cotangent
        columns.append(out)
    edges[dual[columns[-1]]] = {"v"}
    edges["R"] = {"ξ0"}
    edges["ℓ"] = {columns[-1]}
    return edges, columns


def reached(edges: Edges, name: str) -> set[str]:
    """Everything that a quantity is a function of, directly or not."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        for before in edges.get(queue.pop(), ()):
            if before not in seen:
                seen.add(before)
                queue.append(before)
    return seen


def check(experiment: Experiment, report: Checked, edges: Edges) -> None:
    """Against derivatives that autograd takes of ξ and ζ, with softplus in place of ReLU: on a ReLU
    network ζ depends on z by jumps only, and every derivative of it in z is zero."""
    values = _autograd(experiment)
    parameters = [name for name in values if name[0] in "θb"]
    wrong = []
    for name in [n for n in values if n[0] in "ξζ"]:
        for parameter in parameters:
            grad = None
            if values[name].requires_grad:
                (grad,) = torch.autograd.grad(
                    values[name].sum(), values[parameter], retain_graph=True, allow_unused=True
                )
            depends = grad is not None and bool(grad.abs().max() > 0)
            if depends != (parameter in reached(edges, name)):
                wrong.append(f"{name} of {parameter}")
    report.claim(
        not wrong,
        "a path leads from a parameter to ξ_j or ζ_j exactly where autograd's derivative of one in "
        f"the other is not 0 ({len(parameters)} parameters, softplus in place of ReLU)"
        + (f": not for {', '.join(wrong)}" if wrong else ""),
    )
    last = max(int(name[1:]) for name in edges if name[0] == "z")
    inner = range(1, last)
    report.claim(
        all(
            {f"z{j}", f"θ{j}", f"b{j}", *(f"θ{k}" for k in range(1, last + 1))}
            <= reached(edges, f"ζ{j}")
            for j in inner
        ),
        "ζ_j depends on θ_j by z_j, and on every other θ: by those behind through ξ_j, by those "
        "before through z_j",
    )
    report.claim(
        all(not reached(edges, f"ζ{j}") & {f"ξ{i}" for i in range(j)} for j in inner),
        "and on none of ξ_0 … ξ_{j−1}, R and ℓ",
    )
    report.claim(
        f"b{last}" not in reached(edges, "R") and f"θ{last}" in reached(edges, "R"),
        f"R_node depends on θ_{last} but not on b_{last}",
    )


def _autograd(experiment: Experiment) -> dict[str, Tensor]:
    """x, z, ξ, ζ and parameters by name, with v = 1."""
    x, found, layer = experiment.x0.clone().requires_grad_(), {}, 0
    found["x0"] = x
    for module in experiment.net:
        if isinstance(module, nn.Linear):
            layer += 1
            found[f"θ{layer}"] = module.weight.detach().clone().requires_grad_()
            found[f"b{layer}"] = module.bias.detach().clone().requires_grad_()
            x = nn.functional.linear(x, found[f"θ{layer}"], found[f"b{layer}"])
            found[f"z{layer}"] = x
        else:
            x = nn.functional.softplus(x)
            found[f"x{layer}"] = x
    chosen = [name for name in found if name[0] in "xz"]
    grads = torch.autograd.grad(x.sum(), [found[n] for n in chosen], create_graph=True)
    for name, grad in zip(chosen, grads, strict=True):
        found[("ξ" if name[0] == "x" else "ζ") + name[1:]] = grad
    return found


def _figure(edges: Edges, columns: list[str]):
    """Values in the upper row, cotangents in the lower, from left to right as in the paper."""
    place = {name: (1.6 * k, 1.5) for k, name in enumerate(columns)}
    for k, name in enumerate(columns):
        place[("ξ" if name[0] == "x" else "ζ") + name[1:]] = (1.6 * k, 0.0)
    for k, name in enumerate(columns):
        if name[0] == "z":
            place[f"θ{name[1:]}"] = (1.6 * k - 0.8, 0.75)
            place[f"b{name[1:]}"] = (1.6 * k - 0.8, 2.2)
    end = 1.6 * len(columns)
    place |= {"ℓ": (end, 1.5), "v": (end, 0.0), "R": (-1.6, 0.0)}
    figure, (ax,) = drawing.panels(1, width=7.2, height=1.9)
    for name, befores in edges.items():
        for before in befores:
            kind = drawing.BLUE if name[0] in "ξζR" else drawing.GREY
            _arrow(ax, place[before], place[name], color=kind)
    _arrow(ax, place[columns[-1]], place["v"], color=drawing.BLUE, ls="--")
    for name, (a, b) in place.items():
        symbol = {"R": "R", "ℓ": "ℓ", "v": "v"}.get(name) or re.sub(r"(\D)(\d)", r"\1_\2", name)
        colour = drawing.BLUE if name[0] in "ξζRv" else drawing.BLACK
        ax.text(a, b, f"${symbol}$", ha="center", va="center", fontsize=12, color=colour)
    ax.set_xlim(-2.2, end + 0.6)
    ax.set_ylim(-0.45, 2.6)
    ax.set_aspect("equal")
    ax.axis("off")
    return figure


def _arrow(ax, start: tuple[float, float], end: tuple[float, float], **look) -> None:
    style = {"arrowstyle": "-|>", "lw": 1.0, "shrinkA": 9, "shrinkB": 9, "mutation_scale": 9}
    ax.annotate("", xy=end, xytext=start, arrowprops=style | look)
