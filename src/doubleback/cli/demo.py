"""``doubleback demo``: one network, trained plainly and with penalties; what that buys, and costs.

Everything printed is measured in this run: nothing is read from a file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from doubleback.cli import UsageError, experiment, nearest, require, target
from doubleback.cli.experiment import Images, Step
from doubleback.cli.report import page

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

BATCH = 64
SIZES = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2)  # of attacks, in units of a pixel's range
ATTACK = 0.1  # the one in the table
PGD_STEPS = 10
SHOWN = 8  # test images whose input gradients are drawn
TESTED = 1000  # test images at most that are attacked


@dataclass(frozen=True)
class Choice:
    """A penalty that the demo knows, with the weight at which it does something here."""

    build: Callable[[], db.Penalty]
    weight: float
    formula: str


PENALTIES = {
    "loss-gradient": Choice(lambda: db.LossGradient("cross_entropy"), 1.0, "‖∇ₓℓ‖²"),
    "jacobian": Choice(lambda: db.Jacobian(), 0.03, "‖∂out/∂x‖²_F"),
    "spectral-norm": Choice(lambda: db.SpectralNorm(), 0.1, "σ₁(∂out/∂x)"),
}


def run(arguments: argparse.Namespace) -> int:
    """Train, measure, print, and write the report."""
    require("rich", extra="demo")
    from rich.console import Console

    started = time.perf_counter()
    names = arguments.penalty or ["loss-gradient", "jacobian"]
    for name in names:
        nearest("--penalty", name, PENALTIES)
    device = target.device(arguments.device)
    folder = target.folder(arguments.out)
    data = Images.load(arguments.data, arguments.seed, device)
    console = Console(highlight=False, stderr=arguments.json)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small gain nothing by more
    try:
        results = Demo(arguments, names, device, data, console).run()
    finally:
        torch.set_num_threads(threads)
    results["seconds"] = time.perf_counter() - started
    written = folder / "report.html", folder / "results.json"
    try:
        written[0].write_text(page(results), encoding="utf-8")
        written[1].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {folder} cannot be written to: {error.strerror}") from error
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        show(console, results)
        console.print(f"\nreport: {written[0].resolve()}   ({results['seconds']:.0f} s)")
    return 0


class Demo:
    """One run of the demo: networks, what they were trained with, what is measured of them."""

    def __init__(
        self, arguments: argparse.Namespace, names: list[str], device: torch.device,
        data: Images, console: Console,
    ) -> None:  # fmt: skip
        self.arguments, self.names, self.device, self.data = arguments, names, device, data
        self.console = console
        self.epochs = arguments.epochs or (16 if arguments.data == "digits" else 1)
        given = arguments.weight
        self.weights = {n: PENALTIES[n].weight if given is None else given for n in names}
        self.nets = {name: self._network() for name in ("plain", *names)}

    def _network(self) -> nn.Module:
        name, shape = self.arguments.net, self.data.shape
        torch.manual_seed(self.arguments.seed)
        if ":" in name:
            net = target.module(name)
        else:
            nearest("--net", name, experiment.NETS, "or package.module:factory")
            net = experiment.network(name, shape, self.arguments.seed)
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
        x, y = self.data.test
        return {
            "settings": {
                "net": self.arguments.net,
                "epochs": self.epochs,
                "batch": BATCH,
                "seed": self.arguments.seed,
                "weights": self.weights,
                "data": self.data.name,
                "training images": len(self.data.train[1]),
                "test images": len(y),
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
            "costs": costs,
            "parity": parity,
            "plans": plans,
            "pictures": self._pictures(x[:SHOWN], y[:SHOWN]),
        }

    # ------------------------------------------------------------------------------- training

    def _train(self, bar: Progress, name: str, net: nn.Module) -> None:
        if name == "plain":
            step = experiment.plain_step(net)
        else:
            model = db.Penalised(net, PENALTIES[name].build(), compile=self.arguments.compile)
            step = experiment.sweeps_step(model, self.weights[name])
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
        found = {}
        for done, (name, net) in enumerate(self.nets.items(), start=1):
            net.eval()
            found[name] = measure(net, x, y)
            net.train()
            state = f"{name}: PGD {found[name]['PGD'][SIZES.index(ATTACK)]:.1%} at ε = {ATTACK}"
            bar.update(task, completed=done, state=state)
            self._line("attack", done, len(self.nets), state)
        return found

    def _costs(self, bar: Progress) -> dict[str, Any]:
        """Each penalty on the network that it trained."""
        x, y = (values[:BATCH] for values in self.data.train)
        found = {}
        for name in self.names:
            net, budget = self.nets[name], self.arguments.seconds
            ways = experiment.steps(
                net, PENALTIES[name].build(), self.weights[name], self.arguments.compile
            )
            task = bar.add_task(f"time, {name}", total=budget, state="")
            start, times = time.perf_counter(), {}
            for times in experiment.interleaved(ways, net, x, y, budget):
                rounds = len(times[experiment.PLAIN])
                passed = min(time.perf_counter() - start, budget)
                bar.update(task, completed=passed, state=f"{rounds} rounds")
            found[name] = experiment.summary(times)
            state = f"{found[name][experiment.PLAIN]['rounds']} rounds"
            bar.update(task, completed=budget, state=state)
            self._line(f"time, {name}", 1, 1, state)
        return found

    def _explained(self, bar: Progress) -> tuple[dict, dict]:
        x, y = (values[:16] for values in self.data.test)
        task = bar.add_task("compare with autograd", total=len(self.names), state="")
        parity, plans = {}, {}
        for done, name in enumerate(self.names, start=1):
            penalty = PENALTIES[name].build()
            if isinstance(penalty, db.SpectralNorm):
                penalty = db.SpectralNorm(1, warm_start=False)  # the same v in every comparison
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

    def _pictures(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Test images, and ∇ₓℓ by each network."""
        gradients = {}
        for name, net in self.nets.items():
            net.eval()
            gradients[name] = input_gradient(net, x, y)[1][:, 0].tolist()
            net.train()
        return {"images": x[:, 0].tolist(), "labels": y.tolist(), "gradients": gradients}

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
    out, gradient = input_gradient(net, x, y)
    with torch.no_grad():
        _, squares = db.Penalised(net, db.Jacobian(reduction="none"))(x)
        fgsm = [accuracy(net((x + e * gradient.sign()).clamp(0, 1)), y) for e in SIZES]
    return {
        "accuracy": accuracy(out, y),
        "mean ‖∇ₓℓ‖": gradient.flatten(1).norm(dim=1).mean().item(),
        "mean ‖J‖_F": squares.sqrt().mean().item(),
        "FGSM": fgsm,
        "PGD": [fgsm[0], *(accuracy(net(pgd(net, x, y, size)), y) for size in SIZES[1:])],
    }


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
    table = Table("one training step", box=box.SIMPLE_HEAD)
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
    for name, cost in results["costs"].items():
        stock, patch, ours = (
            cost[way]["seconds"] for way in (experiment.STOCK, experiment.PATCH, experiment.OURS)
        )
        relation = f"{stock / ours:.2f} times as fast as" if ours < stock else "not faster than"
        also = f"gains nothing here ({stock / patch:.2f} times)"
        if patch < stock:
            also = f"makes that {stock / patch:.2f} times as fast"
        formula = results["formulas"][name]
        yield f"{formula}: db.Penalised is {relation} stock autograd; db.patch() {also}."
    worst = max(row["worst"] for row in results["parity"].values())
    rows = sum(row["rows"] for row in results["parity"].values())
    yield (
        f"Parity with autograd on these networks, float64: {rows} quantities, worst relative "
        f"error {worst:.1e}."
    )
