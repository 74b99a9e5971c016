"""``doubleback demo``: one network, trained plainly and with penalties; what that buys, and costs.

Everything printed is measured in this run: nothing is read from a file. The report is one HTML file
that needs nothing beside it.
"""

from __future__ import annotations

import argparse
import base64
import json
import platform
import statistics
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from doubleback.cli import UsageError, nearest, require, shared
from doubleback.cli.shared import Images, Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

BATCH = 64
SIZES = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2)  # of attacks, in units of a pixel's range
ATTACK = 0.1  # the one in the table
PGD_STEPS = 10
SHOWN = 8  # test images whose input gradients are drawn
TESTED = 1000  # test images at most that are attacked
AT_ONCE = 1 << 16  # their pixels that are attacked together: more leaves a CPU's caches
SEEN = 19_200  # training images in all epochs together, in 16 at most, unless --epochs is given


@dataclass(frozen=True)
class DemoPenalty:
    """A penalty that the demo knows, with the weight at which it does something here; `call` and
    `given` are for the report: how it is written, and what the model is called with."""

    build: Callable[[], db.Penalty]
    weight: float
    formula: str
    call: str
    given: str = "x"


PENALTIES = {
    "loss-gradient": DemoPenalty(
        lambda: db.LossGradient("cross_entropy"),
        1.0,
        "‖∇ₓℓ‖²",
        'db.LossGradient("cross_entropy")',
        "x, y",
    ),
    "jacobian": DemoPenalty(lambda: db.Jacobian(), 0.03, "‖∂out/∂x‖²_F", "db.Jacobian()"),
    "spectral-norm": DemoPenalty(
        lambda: db.SpectralNorm(), 0.1, "σ₁(∂out/∂x)", "db.SpectralNorm()"
    ),
}


def run(arguments: argparse.Namespace) -> int:
    """Train, measure, print, and write the report."""
    require("rich", extra="demo")
    from rich.console import Console

    started = time.perf_counter()
    names = arguments.penalty or ["loss-gradient", "jacobian"]
    for name in names:
        nearest("--penalty", name, PENALTIES)
    device = shared.device(arguments.device)
    folder = shared.folder(arguments.out)
    data = Images.load(arguments.data, arguments.seed, device)
    shared.keep_memory()
    console = Console(highlight=False, stderr=arguments.json)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small gain nothing by more
    try:
        results = Demo(arguments, names, device, data, console).run()
    finally:
        torch.set_num_threads(threads)
    results["seconds"] = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        show(console, results)
    report = folder / "report.html"
    shared.replace(report, page(results).encode())
    shared.replace(folder / "results.json", f"{json.dumps(results, indent=1)}\n".encode())
    if not arguments.json:
        console.print(f"\nreport: {report.resolve()}   ({results['seconds']:.0f} s)")
    return 0


class Demo:
    """One run of the demo: networks, what they were trained with, what is measured of them."""

    def __init__(
        self, arguments: argparse.Namespace, names: list[str], device: torch.device,
        data: Images, console: Console,
    ) -> None:  # fmt: skip
        self.arguments, self.names, self.device, self.data = arguments, names, device, data
        self.console = console
        self.epochs = arguments.epochs or min(16, max(1, round(SEEN / len(data.train[1]))))
        given = arguments.weight
        self.weights = {n: PENALTIES[n].weight if given is None else given for n in names}
        self.nets = {name: self._network() for name in ("plain", *names)}

    def _network(self) -> nn.Module:
        name, shape = self.arguments.net, self.data.shape
        torch.manual_seed(self.arguments.seed)
        if ":" in name:
            net = shared.module(name)
        else:
            nearest("--net", name, shared.NETS, "or package.module:factory")
            net = shared.network(name, shape, self.arguments.seed)
        net = net.to(self.device)
        try:
            with torch.no_grad():
                out = net(self.data.train[0][:2])
        except Exception as error:
            raise UsageError(f"--net {name} fails on images of shape {shape}: {error}") from error
        if not isinstance(out, Tensor) or tuple(out.shape) != (2, 10):
            raise UsageError(f"--net {name} must map images {shape} to 10 logits each")
        return net

    def run(self) -> dict[str, Any]:
        with self._progress() as bar:
            for name, net in self.nets.items():
                self._train(bar, name, net)
            quality = self._quality(bar)
            costs = self._costs(bar)
            parity, plans = self._explained(bar)
        return {
            "settings": {
                "net": self.arguments.net,
                "epochs": self.epochs,
                "batch": BATCH,
                "seed": self.arguments.seed,
                "weights": self.weights,
                "data": self.data.name,
                "training images": len(self.data.train[1]),
                "test images": len(self.data.test[1]),
                "parameters": sum(p.numel() for p in self.nets["plain"].parameters()),
                "sizes": SIZES,
                "PGD steps": PGD_STEPS,
            },
            "formulas": {n: PENALTIES[n].formula for n in self.names},
            "versions": {
                "doubleback": db.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": torch.cuda.get_device_name(self.device)
                if self.device.type == "cuda"
                else "CPU, one thread",
            },
            "quality": quality,
            "clock": shared.clock(self.device)[1],
            "costs": costs,
            "parity": parity,
            "plans": plans,
            "pictures": self._pictures(),
        }

    # ------------------------------------------------------------------------------- training

    def _train(self, bar: Progress, name: str, net: nn.Module) -> None:
        if name == "plain":
            step = shared.plain_step(net)
        else:
            model = db.Penalised(net, PENALTIES[name].build(), compile=self.arguments.compile)
            step = shared.sweeps_step(model, self.weights[name])
        task = bar.add_task(f"train, {name}", total=self.epochs, state="")
        for epoch, loss, hits in train(net, step, self.data, self.epochs, self.arguments.seed):
            state = f"loss {loss:6.3f}   accuracy {hits:6.1%}"
            bar.update(task, completed=epoch, state=state)
            self._line(f"train, {name}", epoch, self.epochs, state)

    def _line(self, name: str, done: int, total: int, state: str) -> None:
        """Where there is no terminal: a line at each quarter instead of a bar."""
        if not self.console.is_terminal and (done * 4) // total > ((done - 1) * 4) // total:
            self.console.print(f"{name:<22} {done:>3}/{total}   {state}")

    # ------------------------------------------------------------------------------ measuring

    def _quality(self, bar: Progress) -> dict[str, Any]:
        x, y = (values[:TESTED] for values in self.data.test)
        task = bar.add_task("attack", total=len(self.nets), state="")
        quality = {}
        for done, (name, net) in enumerate(self.nets.items(), start=1):
            net.eval()
            quality[name] = measure(net, x, y)
            net.train()
            state = f"{name}: PGD {quality[name]['PGD'][SIZES.index(ATTACK)]:.1%} at ε = {ATTACK}"
            bar.update(task, completed=done, state=state)
            self._line("attack", done, len(self.nets), state)
        return quality

    def _costs(self, bar: Progress) -> dict[str, Any]:
        """Each penalty on the network that it trained."""
        x, y = (values[:BATCH] for values in self.data.train)
        costs = {}
        for name in self.names:
            net, budget = self.nets[name], self.arguments.seconds
            ways = shared.steps(
                net, PENALTIES[name].build(), self.weights[name], self.arguments.compile
            )
            task = bar.add_task(f"time, {name}", total=budget, state="")
            start, times = time.perf_counter(), {}
            for times in shared.interleaved(ways, net, x, y, budget):
                rounds = len(times[shared.PLAIN])
                passed = min(time.perf_counter() - start, budget)
                bar.update(task, completed=passed, state=f"{rounds} rounds")
            costs[name] = shared.summary(times)
            state = f"{costs[name][shared.PLAIN]['rounds']} rounds"
            bar.update(task, completed=budget, state=state)
            self._line(f"time, {name}", 1, 1, state)
        return costs

    def _explained(self, bar: Progress) -> tuple[dict, dict]:
        x, y = (values[:16] for values in self.data.test)
        task = bar.add_task("compare with autograd", total=len(self.names), state="")
        parity, plans = {}, {}
        for done, name in enumerate(self.names, start=1):
            penalty = PENALTIES[name].build().afresh()  # the same v in every comparison
            model = db.Penalised(self.nets[name], penalty)
            extra = (y,)[: penalty.extras]
            report = db.check(model, x, *extra)
            parity[name] = {"worst": report.worst, "rows": len(report.rows), "text": str(report)}
            full = (values[:BATCH] for values in self.data.train)
            plans[name] = str(model.explain(*(t for t, _ in zip(full, (x, *extra), strict=False))))
            state = f"worst relative error {report.worst:.1e}"
            bar.update(task, completed=done, state=state)
            self._line("compare with autograd", done, len(self.names), f"{name}: {state}")
        return parity, plans

    def _pictures(self) -> dict[str, Any]:
        """∇ₓℓ by each network at test images, evenly from that at which the plain network's is
        smallest to that at which it is largest."""
        x, y = (values[:TESTED] for values in self.data.test)
        gradients = {}
        for name, net in self.nets.items():
            net.eval()
            gradients[name] = input_gradient(net, x, y)[1]
            net.train()
        order = gradients["plain"].flatten(1).norm(dim=1).argsort()
        shown = order[torch.linspace(0, len(order) - 1, min(SHOWN, len(order))).long()]
        return {
            "images": x[shown, 0].tolist(),
            "labels": y[shown].tolist(),
            "gradients": {name: g[shown, 0].tolist() for name, g in gradients.items()},
        }

    def _progress(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description:<22}"), BarColumn(bar_width=20),
            TextColumn("{task.fields[state]:<34}"), TimeElapsedColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip


def train(
    net: nn.Module, step: Step, data: Images, epochs: int, seed: int
) -> Iterator[tuple[int, float, float]]:
    """Train in place; after each epoch yield its number, mean loss and training accuracy."""
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    shuffle = torch.Generator().manual_seed(seed)
    images, labels = data.train
    for epoch in range(1, epochs + 1):
        losses, hits = [], []
        for rows in torch.randperm(len(labels), generator=shuffle).split(BATCH):
            if len(rows) < min(BATCH, len(labels)):
                continue
            rows = rows.to(labels.device)
            optimiser.zero_grad()
            out, loss = step(images[rows], labels[rows])
            optimiser.step()
            losses.append(loss.item())
            hits.append(accuracy(out, labels[rows]))
        yield epoch, statistics.fmean(losses), statistics.fmean(hits)


def accuracy(out: Tensor, labels: Tensor) -> float:
    return (out.argmax(1) == labels).float().mean().item()


def input_gradient(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """out, and ∇ₓℓ of each example."""
    x = x.detach().requires_grad_()
    out = net(x)
    return out, torch.autograd.grad(F.cross_entropy(out, y, reduction="sum"), x)[0]


def measure(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Accuracy, slopes, and accuracy under attacks of growing size, on the test set."""
    rows = max(1, AT_ONCE // x[0].numel())
    jacobian = db.Penalised(net, db.Jacobian(reduction="none"))
    both = zip(x.split(rows), y.split(rows), strict=True)
    parts = [_measured(net, jacobian, *part) for part in both]
    slope, norm, fgsm, projected = (torch.cat(kind, dim=-1) for kind in zip(*parts, strict=True))
    return {
        "accuracy": fgsm[0].mean().item(),
        "mean ‖∇ₓℓ‖": slope.mean().item(),
        "max ‖∇ₓℓ‖": slope.max().item(),
        "mean ‖J‖_F": norm.mean().item(),
        "FGSM": fgsm.mean(1).tolist(),
        "PGD": projected.mean(1).tolist(),
    }


def _measured(
    net: nn.Module, jacobian: db.Penalised, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖∇ₓℓ‖ and ‖J‖_F of each example; and, a row for each of `SIZES`, whether it is classified
    correctly after one step of that size and after several."""

    def right(attacked: Tensor) -> Tensor:
        with torch.no_grad():
            return (net(attacked).argmax(1) == y).float()

    _, gradient = input_gradient(net, x, y)
    with torch.no_grad():
        _, squares = jacobian(x)
    fgsm = [right((x + size * gradient.sign()).clamp(0, 1)) for size in SIZES]
    projected = [fgsm[0], *(right(pgd(net, x, y, size)) for size in SIZES[1:])]
    norm = gradient.flatten(1).norm(dim=1)
    return norm, squares.sqrt(), torch.stack(fgsm), torch.stack(projected)


def pgd(net: nn.Module, x: Tensor, y: Tensor, size: float) -> Tensor:
    """Projected gradient ascent of the loss within ‖x′ − x‖_∞ ≤ size, from x."""
    seen = x
    for _ in range(PGD_STEPS):
        seen = seen + 2.5 * size / PGD_STEPS * input_gradient(net, seen, y)[1].sign()
        seen = torch.minimum(torch.maximum(seen, x - size), x + size).clamp(0, 1).detach()
    return seen


def show(console: Console, results: dict[str, Any]) -> None:
    """The two tables, and what they say."""
    from rich import box
    from rich.table import Table

    settings, quality = results["settings"], results["quality"]
    weights = settings["weights"]
    at = SIZES.index(ATTACK)
    title = f"{settings['net']} net, {settings['parameters']} parameters; {settings['data']}: "
    title += f"{settings['test images']} test images"
    table = Table("trained", box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("accuracy", "‖∇ₓℓ‖", "‖J‖_F", f"FGSM ε={ATTACK}", f"PGD ε={ATTACK}"):
        table.add_column(column, justify="right")
    for name, row in quality.items():
        table.add_row(
            name if name == "plain" else f"+ {weights[name]:g} · {results['formulas'][name]}",
            f"{row['accuracy']:.1%}", f"{row['mean ‖∇ₓℓ‖']:.3f}", f"{row['mean ‖J‖_F']:.2f}",
            f"{row['FGSM'][at]:.1%}", f"{row['PGD'][at]:.1%}",
        )  # fmt: skip
    console.print(table)
    columns = list(results["costs"])
    table = Table(f"{results['clock']} of a training step", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(results["formulas"][name], justify="right")
    for way in results["costs"][columns[0]]:
        cells = (results["costs"][name][way] for name in columns)
        table.add_row(
            way, *(f"{1e3 * c['seconds']:.1f} ms  {c['over plain']:5.2f}×" for c in cells)
        )
    console.print(table)
    for sentence in sentences(results):
        console.print(sentence)


def sentences(results: dict[str, Any]) -> Iterator[str]:
    """What was measured, in words; said as it is where the library is not ahead."""
    at = results["settings"]["sizes"].index(ATTACK)
    plain, *others = (
        (_words(results, name), f"{row['PGD'][at]:.1%}", f"{row['accuracy']:.1%}")
        for name, row in results["quality"].items()
    )
    more = "; ".join(f"{attacked} with {words} ({clean})" for words, attacked, clean in others)
    yield (
        f"Right under a PGD attack of ε = {ATTACK} (and without): {plain[1]} plain ({plain[2]}); "
        f"{more}."
    )
    for name, cost in results["costs"].items():
        stock, patch, ours = (
            cost[way]["seconds"] for way in (shared.STOCK, shared.PATCH, shared.OURS)
        )
        times, patched = stock / ours, stock / patch  # 1.00 when rounded is no faster
        relation = f"not faster than stock autograd ({times:.2f} times)"
        if times >= 1.005:
            relation = f"{times:.2f} times as fast as stock autograd"
        also = f"gains nothing here ({patched:.2f} times)"
        if patched >= 1.005:
            also = f"makes stock {patched:.2f} times as fast"
        formula = results["formulas"][name]
        yield f"{formula}: db.Penalised is {relation}; db.patch() {also}."
    worst = max(row["worst"] for row in results["parity"].values())
    rows = sum(row["rows"] for row in results["parity"].values())
    yield (
        f"Parity with autograd on these networks, float64: {rows} quantities, worst relative "
        f"error {worst:.1e}."
    )


# ---------------------------------------------------------------------------------- the report

COLOURS = ("#6b7480", "#2563a8", "#e07b21", "#2f8f5b")  # plain, then one for each penalty

STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --soft: #667; --line: #d7dce2; --back: #fff;
  --card: #f6f8fa; --good: #2f8f5b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa3ad; --line: #3a414b;
  --back: #15181d; --card: #1e2329; --good: #63c390; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--back);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .8rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 600; font-size: .88rem; }
tr.ours td { font-weight: 600; }
.short { padding-left: 1.2rem; } .short li { margin: .25rem 0; }
.costs { width: 100%; margin-bottom: 1.4rem; } .costs td:last-child, .costs th:last-child {
  width: 45%; text-align: left; padding-right: 0; }
.bar { height: .8em; border-radius: 2px; background: var(--soft); min-width: 2px; }
.ours .bar { background: var(--good); }
.new { color: var(--good); } .old { color: var(--soft); }
@media (max-width: 40rem) { th, td { padding: .3rem .4rem; font-size: .9rem; }
  th { white-space: normal; }
  .costs td:last-child, .costs th:last-child { display: none; } }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } .charts svg { flex: 1 1 20rem; }
svg { max-width: 34rem; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid td { padding: .15rem; border: 0; text-align: center; }
.grid img { width: 4.2rem; height: 4.2rem; image-rendering: pixelated; border-radius: 3px;
  display: block; }
.grid td:first-child { padding-right: .8rem; text-align: left; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto;
  font-size: .84rem; line-height: 1.4; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; }
.key { display: inline-block; margin-right: 1.4em; }
"""


def page(results: dict[str, Any]) -> str:
    """The report of a run, from what it measured alone."""
    settings, versions = results["settings"], results["versions"]
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "device")
    body = [
        "<h1>What a derivative in the loss buys, and what it costs</h1>",
        f"<p class=soft>{settings['net']} network, {settings['parameters']} parameters, on "
        f"{settings['training images']} training and {settings['test images']} test images "
        f"({escape(settings['data'])}), {settings['epochs']} epochs of batches of "
        f"{settings['batch']}, seed {settings['seed']}. {escape(versions['device'])}; {told}. "
        f"All of it measured in this run, {results['seconds']:.0f} s.</p>",
        f"<ul class=short>{''.join(f'<li>{escape(s)}</li>' for s in sentences(results))}</ul>",
        *(_section(title, text) for title, text in _sections(results)),
    ]
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<link rel=icon href="data:,">'
        f"<title>doubleback: the demo's report</title><style>{STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _section(title: str, text: str) -> str:
    return f"<h2>{title}</h2>\n{text}"


def _sections(results: dict[str, Any]) -> Iterable[tuple[str, str]]:
    settings = results["settings"]
    yield "What it buys", _quality(results)
    sizes = settings["sizes"]
    charts = (
        _chart(
            f"accuracy under {attack}", sizes, {n: r[attack] for n, r in results["quality"].items()}
        )
        for attack in ("FGSM", "PGD")
    )
    yield (
        "Robustness",
        f"<p class=soft>Accuracy on attacked test images, ‖x′ − x‖<sub>∞</sub> ≤ ε, pixels in "
        f"[0, 1]. FGSM is one step of the gradient's signs, PGD {settings['PGD steps']} smaller "
        f"ones.</p>{_legend(results)}<div class=charts>{''.join(charts)}</div>",
    )
    yield (
        "The gradient that is penalised",
        "<p class=soft>∇ₓℓ at test images, from the one where the plain network's is smallest to "
        "the one where it is largest; each on its own scale (red: more ink there raises the loss; "
        "blue: lowers it), with its norm below. A confident network's loss is flat at most images "
        "and steep at a few, through which an attack gets in; a penalty evens that out.</p>"
        + _pictures(results),
    )
    yield "The change in the training loop", _change(results)
    yield "What it costs", _costs(results)
    yield "Is it right?", _parity(results)
    yield "The plan", _plans(results)


def _words(results: dict[str, Any], name: str) -> str:
    return f"{results['settings']['weights'].get(name, 0):g} · {results['formulas'].get(name)}"


def _label(results: dict[str, Any], name: str) -> str:
    return "plain" if name == "plain" else f"+ {escape(_words(results, name))}"


def _table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], kind: str = "") -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    marked = [f"<tr>{lines[0]}</tr>"]
    for cells, ours in rows:
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        marked.append(f"<tr{' class=ours' if ours else ''}>{row}</tr>")
    return f"<div class=wide><table class='{kind}'>{''.join(marked)}</table></div>"


def _quality(results: dict[str, Any]) -> str:
    at = results["settings"]["sizes"].index(ATTACK)
    head = ["loss", "accuracy", f"FGSM, ε = {ATTACK}", f"PGD, ε = {ATTACK}"]
    head += ["mean ‖∇ₓℓ‖", "largest", "mean ‖J‖<sub>F</sub>"]
    rows = []
    for name, row in results["quality"].items():
        cells = [_label(results, name), f"{row['accuracy']:.1%}"]
        cells += [f"{row[attack][at]:.1%}" for attack in ("FGSM", "PGD")]
        cells += [f"{row[f'{which} ‖∇ₓℓ‖']:.2f}" for which in ("mean", "max")]
        rows.append(([*cells, f"{row['mean ‖J‖_F']:.2f}"], False))
    return (
        "<p class=soft>On test images: the share that is classified correctly, as it is and "
        "attacked; how steep the loss is in the image; how far the ten outputs follow a change of "
        "the image, J = ∂out/∂x.</p>" + _table(head, rows)
    )


def _change(results: dict[str, Any]) -> str:
    """The lines that were added to the plain loop, for the first penalty."""
    name = next(iter(results["costs"]))
    penalty, weight = PENALTIES[name], results["settings"]["weights"][name]
    lines = (
        ("+", f"model = db.Penalised(net, {penalty.call})"),
        (" ", "for x, y in batches:"),
        ("-", "    out = net(x)"),
        ("-", "    loss = F.cross_entropy(out, y)"),
        ("+", f"    out, penalty = model({penalty.given})"),
        ("+", f"    loss = F.cross_entropy(out, y) + {weight:g} * penalty"),
        (" ", "    loss.backward()"),
    )
    marked = (
        f"<span class={'new' if sign == '+' else 'old' if sign == '-' else 'same'}>"
        f"{escape(f'{sign} {line}')}</span>"
        for sign, line in lines
    )
    return f"<pre>{chr(10).join(marked)}</pre>"


def _costs(results: dict[str, Any]) -> str:
    parts = []
    for name, cost in results["costs"].items():
        most = max(way["seconds"] for way in cost.values())
        rows = []
        for way, timing in cost.items():
            bar = f"<div class=bar style='width:{100 * timing['seconds'] / most:.1f}%'></div>"
            milliseconds = f"{1e3 * timing['seconds']:.1f} ms"
            cells = [escape(way), milliseconds, f"{timing['over plain']:.2f}×", bar]
            rows.append((cells, way not in (shared.PLAIN, shared.STOCK)))
        head = [
            f"a step with {escape(results['formulas'][name])}",
            results["clock"],
            "over plain",
            "",
        ]
        parts.append(_table(head, rows, "costs"))
    rounds = " and ".join(str(cost[shared.PLAIN]["rounds"]) for cost in results["costs"].values())
    return (
        "<p class=soft>Medians over " + rounds + " interleaved rounds: every way takes a turn in "
        "each, so that a busy machine slows all alike. Ratios are to the plain step of the same "
        "round. All but the first row compute the same gradient; those in bold are doubleback."
        "</p>" + "".join(parts)
    )


def _parity(results: dict[str, Any]) -> str:
    parts = []
    for name, parity in results["parity"].items():
        parts.append(
            f"<p>{_label(results, name)}: worst relative error {parity['worst']:.1e} in "
            f"{parity['rows']} quantities.</p><details><summary>the worst of them</summary>"
            f"<pre>{escape(parity['text'])}</pre></details>"
        )
    return (
        "<p class=soft>The networks as trained above, in float64, against PyTorch's own double "
        "backward: output, penalty and every gradient (<code>db.check</code>).</p>" + "".join(parts)
    )


def _plans(results: dict[str, Any]) -> str:
    plans = "".join(
        f"<details{' open' if i == 0 else ''}><summary>{_label(results, name)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
        for i, (name, text) in enumerate(results["plans"].items())
    )
    return (
        "<p class=soft><code>print(model.explain(x, y))</code>, before anything runs.</p>" + plans
    )


# -------------------------------------------------------------------------------------- pictures


def _legend(results: dict[str, Any]) -> str:
    items = (
        f'<span class=key><span class=swatch style="background:{colour}"></span>'
        f"{_label(results, name)}</span>"
        for colour, name in zip(COLOURS, results["quality"], strict=False)
    )
    return f"<p>{''.join(items)}</p>"


def _chart(title: str, xs: Sequence[float], curves: dict[str, Sequence[float]]) -> str:
    """Lines over [0, max x] × [0, 1] as SVG."""
    width, height, left, bottom, top = 420, 260, 44, 34, 24

    def at(x: float, y: float) -> tuple[float, float]:
        inner = width - left - 12, height - bottom - top
        return left + x / xs[-1] * (inner[0] - 8), top + (1 - y) * inner[1]

    parts = [f'<text x="{left}" y="14" style="font-weight:600">{title}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x0, y = at(0, tick)
        parts.append(
            f'<line x1="{x0}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    for x in xs[::2]:
        place, y = at(x, 0)
        parts.append(f'<text x="{place:.1f}" y="{y + 16:.1f}" text-anchor="middle">{x:g}</text>')
    middle, y = at(xs[-1] / 2, 0)
    parts.append(f'<text x="{middle:.1f}" y="{y + 31:.1f}" text-anchor="middle">ε</text>')
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
        points = [at(x, value) for x, value in zip(xs, values, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        )
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"><title>{escape(name)}, '
            f"ε = {x:g}: {value:.1%}</title></circle>"
            for (a, b), x, value in zip(points, xs, values, strict=True)
        ]
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _pictures(results: dict[str, Any]) -> str:
    shown = results["pictures"]
    rows = [["image", *(_image(_grey(image)) for image in shown["images"])]]
    for name, gradients in shown["gradients"].items():
        cells = [_label(results, name)]
        for gradient in gradients:
            norm = sum(v * v for row in gradient for v in row) ** 0.5
            cells.append(f"{_image(_diverging(gradient))}<span class=soft>{norm:.2g}</span>")
        rows.append(cells)
    cells = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class=grid>{"".join(cells)}</table></div>'


Rows = list[list[tuple[int, int, int]]]


def _grey(image: list[list[float]]) -> Rows:
    return [[(int(255 * (1 - v)),) * 3 for v in row] for row in image]  # type: ignore[misc]


def _diverging(gradient: list[list[float]]) -> Rows:
    """White at zero, red above, blue below, full at the largest entry."""
    most = max(max(abs(v) for row in gradient for v in row), 1e-30)

    def colour(v: float) -> tuple[int, int, int]:
        fade = int(255 * (1 - min(abs(v) / most, 1.0)))
        return (
            (255 - (255 - fade) // 8, fade, fade)
            if v > 0
            else (fade, fade, 255 - (255 - fade) // 8)
        )

    return [[colour(v) for v in row] for row in gradient]


def _image(rows: Rows) -> str:
    raw = b"".join(b"\0" + bytes(v for pixel in row for v in pixel) for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">2I5B", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw))
    data = base64.b64encode(png + chunk(b"IEND", b"")).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'
