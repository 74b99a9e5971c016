"""Flows learn a density. Continuous: the divergence of the field is estimated by εᵀJε with one
random vector (FFJORD, Grathwohl et al. 2019), against the exact trace. Residual: the
log-determinant of each block by a power series with Russian roulette (`db.LogDet`, Chen et al.
2019), against the exact one. On a ring of Gaussians and on digits."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from examples import common

MODES, WIDTH, RADIUS = 6, 0.3, 1.6
BATCH = 256
KINDS = ("exact trace", "one projection", "residual blocks, roulette")
BLOCKS, SLOPE = 10, 0.85  # of the residual flow, and the Lipschitz constant of each


def centres() -> Tensor:
    angle = 2 * math.pi * torch.arange(MODES) / MODES
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)


def draw_data(count: int, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(MODES, (count,), generator=generator)
    return centres()[chosen] + WIDTH * torch.randn(count, 2, generator=generator)


def log_density(x: Tensor) -> Tensor:
    """Of the data: a ring of Gaussians."""
    squares = torch.cdist(x, centres().to(x)).square()
    each = -squares / (2 * WIDTH**2) - math.log(2 * math.pi * WIDTH**2)
    return each.logsumexp(1) - math.log(MODES)


def log_normal(x: Tensor) -> Tensor:
    """Of a standard normal."""
    return -x.square().sum(1) / 2 - x.shape[1] / 2 * math.log(2 * math.pi)


class Field(nn.Module):
    """dx/dt = f(x, t)"""

    def __init__(self, axes: int = 2, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(axes + 1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, axes),
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t.expand(len(x), 1)], dim=1))


class Flow(nn.Module):
    """Data at t = 0 become a standard normal at t = 1; log p(x) = log N(x₁) + ∫ tr J dt."""

    def __init__(self, axes: int = 2, width: int = 64) -> None:
        super().__init__()
        self.axes = axes
        self.form = db.Penalised(Field(axes, width), db.BilinearForm(reduction="none"))

    def rate(self, x: Tensor, t: Tensor, probes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """f and Σ ⟨e, J e⟩ over the probes: all unit vectors for the trace, one ε to estimate."""
        rate, trace = self.form(x, t, probes[0], probes[0])
        for probe in probes[1:]:
            trace = trace + self.form(x, t, probe, probe)[1]
        return rate, trace

    def log_prob(self, x: Tensor, steps: int, exact: bool) -> Tensor:
        """By Runge–Kutta of order four in (x, ∫ tr J dt); ε is the same along the path."""
        if exact:
            probes = [e.expand_as(x).contiguous() for e in torch.eye(self.axes, device=x.device)]
        else:
            probes = [torch.randint(2, x.shape, device=x.device).to(x.dtype) * 2 - 1]
        size = 1 / steps
        total = torch.zeros(len(x), device=x.device)
        for i in range(steps):
            times = [torch.full((1, 1), (i + part) * size, device=x.device) for part in (0, 0.5, 1)]
            a, ta = self.rate(x, times[0], probes)
            b, tb = self.rate(x + size / 2 * a, times[1], probes)
            c, tc = self.rate(x + size / 2 * b, times[1], probes)
            d, td = self.rate(x + size * c, times[2], probes)
            x = x + size / 6 * (a + 2 * b + 2 * c + d)
            total = total + size / 6 * (ta + 2 * tb + 2 * tc + td)
        return total + log_normal(x)

    @torch.no_grad()
    def sample(self, count: int, steps: int = 40) -> Tensor:
        """A normal, followed backwards in time."""
        field = self.form.net
        x = torch.randn(count, self.axes, device=next(self.parameters()).device)
        for i in range(steps, 0, -1):
            t = torch.full((1, 1), i / steps, device=x.device)
            middle = x - field(x, t) / (2 * steps)
            x = x - field(middle, t - 1 / (2 * steps)) / steps
        return x


class Contraction(nn.Module):
    """g with a Lipschitz constant of at most `SLOPE`: what a plain network yields, divided by as
    much as the product of its weights' largest singular values exceeds that."""

    def __init__(self, axes: int = 2, width: int = 48, waves: float = 3.0) -> None:
        """waves: by how much the first layer is steeper than usual; 3 for waves that are as long as
        the ring's modes are apart."""
        super().__init__()
        sizes = (axes, width, width, axes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        with torch.no_grad():
            self.layers[0].weight *= waves  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        steep = torch.ones((), device=x.device)
        for i, layer in enumerate(self.layers):
            x = layer(x.sin() if i else x)
            steep = steep * torch.linalg.matrix_norm(layer.weight, 2)  # type: ignore[arg-type]
        return x * (SLOPE / steep.clamp_min(SLOPE))


class Residual(nn.Module):
    """Blocks x + g(x), each invertible since g contracts, with an affine map behind each; data
    become a standard normal. log p(x) = log N(y) + Σ log det(I + J) + Σ log scale."""

    def __init__(
        self, blocks: int = BLOCKS, axes: int = 2, width: int = 48, waves: float = 3.0
    ) -> None:
        super().__init__()
        penalty = db.LogDet(1, terms=2, roulette=0.75, reduction="none")
        self.blocks = nn.ModuleList(
            db.Penalised(Contraction(axes, width, waves), penalty) for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.zeros(blocks, axes))
        self.shift = nn.Parameter(torch.zeros(blocks, axes))

    def log_prob(self, x: Tensor, steps: int, exact: bool) -> Tensor:
        """By the exact determinant of each block, or by the series; `steps` is a continuous flow's
        concern."""
        total = torch.zeros(len(x), device=x.device)
        for block, scale, shift in zip(self.blocks, self.scale, self.shift, strict=True):
            if exact:
                out, volume = block.net(x), exact_log_det(block.net, x)  # type: ignore[arg-type]
            else:
                out, volume = block(x)
            x = (x + out) * scale.exp() + shift
            total = total + volume + scale.sum()
        return total + log_normal(x)

    @torch.no_grad()
    def sample(self, count: int, steps: int = 40) -> Tensor:
        """A normal, every block undone by the fixed point of x = y − g(x)."""
        y = torch.randn(count, self.scale.shape[1], device=self.scale.device)
        layers = list(zip(self.blocks, self.scale, self.shift, strict=True))
        for block, scale, shift in reversed(layers):
            y = (y - shift) * (-scale).exp()
            x = y
            for _ in range(steps):
                x = y - block.net(x)  # type: ignore[operator]
            y = x
        return y


def exact_log_det(net: nn.Module, x: Tensor) -> Tensor:
    """log |det(I + J)| from the whole Jacobian."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda one: net(one[None])[0]))(x)
    return torch.linalg.slogdet(torch.eye(x.shape[1], device=x.device) + jacobian).logabsdet


@dataclass(frozen=True)
class Found:
    nats: float  # −log p of test data by the exact trace or determinant
    estimate: float  # the same as it is estimated in training
    deviation: float  # of one example's estimate from the exact −log p
    curve: list[float]  # training loss
    density: Tensor  # on a grid
    samples: Tensor


def grid(side: int) -> Tensor:
    line = torch.linspace(-3, 3, side)
    return torch.cartesian_prod(line, line).flip(1)


def train(
    kind: str, steps: int, seed: int, device: torch.device
) -> tuple[Flow | Residual, list[float]]:
    torch.manual_seed(seed)
    flow = (Residual() if kind == KINDS[2] else Flow()).to(device)
    optimiser = torch.optim.Adam(flow.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(steps):
        optimiser.zero_grad()
        data = draw_data(BATCH, generator).to(device)
        loss = -flow.log_prob(data, 3, kind == "exact trace").mean()
        loss.backward()
        optimiser.step()
        schedule.step()
        curve.append(loss.item())
    return flow, curve


@torch.no_grad()
def measure(flow: Flow | Residual, curve: list[float], test: Tensor, side: int = 80) -> Found:
    device = next(flow.parameters()).device
    test = test.to(device)
    exact, estimate = (flow.log_prob(test, 10, kind) for kind in (True, False))
    return Found(
        nats=-exact.mean().item(),
        estimate=-estimate.mean().item(),
        deviation=(exact - estimate).std().item(),
        curve=curve,
        density=flow.log_prob(grid(side).to(device), 10, True).exp().reshape(side, side).cpu(),
        samples=flow.sample(1500).cpu(),
    )


def experiment(steps: int, seed: int, device: torch.device) -> tuple[dict[str, Found], float]:
    """What either kind of training found, and −log p of the test data by their true density."""
    test = draw_data(2000, torch.Generator().manual_seed(seed + 10_000))
    found = {kind: measure(*train(kind, steps, seed, device), test) for kind in KINDS}
    return found, -log_density(test).mean().item()


# -------------------------------------------------------------------------------------- digits

LEVELS, PIXELS = 17, 64  # of a digit of 8×8
MARGIN = 0.05


@dataclass(frozen=True)
class Whitened:
    """Pixels in (0, 1) as z = (logit − mean) W, of mean 0 and covariance 1 on the data that it was
    fitted to: a flow by itself, whose density is a Gaussian's."""

    mean: Tensor
    matrix: Tensor

    @classmethod
    def fitted(cls, pixels: Tensor) -> Whitened:
        logits = (MARGIN + (1 - 2 * MARGIN) * pixels).logit()
        values, vectors = torch.linalg.eigh(torch.cov(logits.T))
        return cls(logits.mean(0), vectors / values.sqrt())

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """z, and log |det ∂z/∂pixels|."""
        inner = MARGIN + (1 - 2 * MARGIN) * pixels
        slope = math.log(1 - 2 * MARGIN) - inner.log() - (1 - inner).log()
        volume = torch.linalg.slogdet(self.matrix).logabsdet
        return (inner.logit() - self.mean) @ self.matrix, slope.sum(1) + volume

    def pixels(self, z: Tensor) -> Tensor:
        """The inverse."""
        inner = (z @ torch.linalg.inv(self.matrix) + self.mean).sigmoid()
        return ((inner - MARGIN) / (1 - 2 * MARGIN)).clamp(0, 1)


@dataclass(frozen=True)
class FoundDigits:
    """Bits per pixel of test digits: of a Gaussian of logits, of the flow behind it by the exact
    trace or determinant, and as they are estimated in training."""

    gaussian: float
    exact: float
    estimate: float
    samples: Tensor


def smeared(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Levels with noise of one level's width, so that they have a density."""
    return (pixels * (LEVELS - 1) + torch.rand(pixels.shape, generator=generator)) / LEVELS


def flow_of_digits(kind: str, width: int, blocks: int) -> Flow | Residual:
    if kind == KINDS[2]:
        return Residual(blocks, PIXELS, width, waves=1.0)
    flow = Flow(PIXELS, width)
    last = flow.form.net.layers[-1]  # type: ignore[union-attr,index]
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)  # type: ignore[arg-type,union-attr]
    return flow


def digits(
    kind: str, steps: int, seed: int, device: torch.device, count: int = 200, width: int = 128,
    blocks: int = 6,
) -> FoundDigits:  # fmt: skip
    data = common.load_images("digits", None, seed, torch.device("cpu"))
    train_x, test_x = (images.flatten(1) for images in (data.train[0], data.test[0][:count]))
    generator = torch.Generator().manual_seed(seed)
    white = Whitened.fitted(smeared(train_x.repeat(5, 1), generator))
    torch.manual_seed(seed)
    flow = flow_of_digits(kind, width, blocks).to(device)
    optimiser = torch.optim.Adam(flow.parameters(), lr=1e-2 if kind == KINDS[2] else 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rows = torch.randint(len(train_x), (BATCH,), generator=generator)
        z, _ = white(smeared(train_x[rows], generator))
        optimiser.zero_grad()
        (-flow.log_prob(z.to(device), 2, False).mean()).backward()
        optimiser.step()
        schedule.step()

    def bits(log_prob: Tensor, volume: Tensor) -> float:
        return math.log2(LEVELS) - (log_prob + volume).mean().item() / (PIXELS * math.log(2))

    with torch.no_grad():
        noise = torch.Generator().manual_seed(seed + 1)  # the same for every kind
        z, volume = (t.to(device) for t in white(smeared(test_x, noise)))
        logs = [log_normal(z), flow.log_prob(z, 4, True), flow.log_prob(z, 4, False)]
    samples = white.pixels(flow.sample(25).cpu())
    return FoundDigits(*(bits(one, volume) for one in logs), samples.reshape(-1, 8, 8))


def draw(found: dict[str, Found], entropy: float, written: dict[str, FoundDigits]):
    figure, axes = common.panels(4, 2, width=10.5, height=5.4)
    for kind, one in written.items():
        tiles = F.pad(one.samples, (1, 1, 1, 1)).reshape(5, 5, 10, 10).transpose(1, 2)
        axis = axes.pop(5)
        common.picture(axis, tiles.reshape(50, 50))
        words = "residual" if kind == KINDS[2] else "continuous"
        axis.set_title(f"digits, {words}", fontsize=9)
    side = found[KINDS[0]].density.shape[0]
    images = {
        "true density": log_density(grid(side)).exp().reshape(side, side),
        **{kind: one.density for kind, one in found.items()},
    }
    for axis, (name, image) in zip(axes, images.items(), strict=False):
        axis.imshow(image, origin="lower", extent=(-3, 3, -3, 3), cmap="magma", vmin=0, vmax=0.3)
        axis.set(xticks=[], yticks=[])
        axis.set_title(name, fontsize=9)
    axes[4].scatter(*found[KINDS[2]].samples.T, s=1.5, color=common.GREEN, alpha=0.5)
    axes[4].set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal", xticks=[], yticks=[])
    axes[4].set_title("samples, residual", fontsize=9)
    colours = (common.ORANGE, common.BLUE, common.GREEN)
    for (kind, one), colour in zip(found.items(), colours, strict=True):
        axes[5].plot(one.curve, color=colour, lw=1, label=kind)
    axes[5].axhline(entropy, color=common.INK, lw=1, ls="--", label="true density")
    axes[5].set(xlabel="step", ylim=(entropy - 0.2, entropy + 1.5))
    axes[5].set_title("training loss, nats", fontsize=9)
    axes[5].legend(fontsize=7)
    return figure


def report(
    found: dict[str, Found], entropy: float, written: dict[str, FoundDigits]
) -> common.Report:
    rows = [
        (kind, f"{one.nats:.3f}", f"{one.estimate:.3f}", f"{one.deviation:.3f}")
        for kind, one in found.items()
    ]
    rows.append(("true density", f"{entropy:.3f}", "", ""))
    gaussian = next(iter(written.values())).gaussian
    rows.append(("digits: a Gaussian of logits", f"{gaussian:.3f} bits/dim", "", ""))
    rows += [
        (f"digits: {kind}", f"{one.exact:.3f} bits/dim", f"{one.estimate:.3f} bits/dim", "")
        for kind, one in written.items()
    ]
    columns = ("trained with", "test nats, exact", "… estimated with one ε",
               "deviation of one estimate")  # fmt: skip
    made = common.Report(
        f"Continuous and residual flows on a ring of {MODES} Gaussians, and on digits of 8×8",
        columns,
        rows,
        draw(found, entropy, written),
    )
    exact, one, residual = (found[kind].nats for kind in KINDS)
    made.claim(
        abs(one - exact) < 0.05,
        "training by one direction in place of two reaches the same likelihood: "
        f"{one:.3f} nats against {exact:.3f} by the exact trace, {entropy:.3f} for the truth",
        f"training by one projection does not reach the likelihood of the exact trace: {one:.3f} "
        f"nats against {exact:.3f}",
    )
    made.claim(
        all(abs(f.nats - f.estimate) < 0.05 for f in found.values()),
        "the estimates are unbiased: means over 2000 test points agree within 0.05 nats",
        "an estimate's mean over 2000 test points is off by more than 0.05 nats",
    )
    made.claim(
        residual < entropy + 0.2,
        f"{BLOCKS} residual blocks learn it by roulette, too: {residual:.3f} nats by the exact "
        "determinant",
        f"{BLOCKS} residual blocks trained by roulette stay behind: {residual:.3f} nats by the "
        "exact determinant",
    )
    for kind, one in written.items():
        how = "the exact determinant" if kind == KINDS[2] else "the exact trace"
        told = f"{one.exact:.3f} bits per pixel against {gaussian:.3f} by {how}"
        made.claim(
            one.exact < gaussian - 0.05 and abs(one.exact - one.estimate) < 0.05,
            f"on digits, in {PIXELS} dimensions, {kind} learns what no Gaussian has: {told}",
            f"on digits, in {PIXELS} dimensions, {kind} gains little over a Gaussian: {told}",
        )
    made.numbers = {
        kind: {k: v for k, v in vars(f).items() if isinstance(v, float)}
        for kind, f in found.items()
    } | {
        "true density": entropy,
        **{
            f"digits, {kind}": {k: v for k, v in vars(one).items() if isinstance(v, float)}
            for kind, one in written.items()
        },
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    steps = 3000 if arguments.full else 300
    given = (arguments.seed, arguments.device)
    written = {
        KINDS[1]: digits(KINDS[1], 2 * steps, *given),
        KINDS[2]: digits(KINDS[2], steps + 100, *given, width=96),
    }
    return report(*experiment(steps, arguments.seed, arguments.device), written)


if __name__ == "__main__":
    sys.exit(common.main("flow", __doc__, run))
