"""What the demo trains and measures: a small convolutional net on 8×8 handwritten digits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db

BATCH = 128
NOISES = (0.2, 0.4)  # standard deviations; pixels lie in [0, 1]
ATTACKS = (0.05, 0.1, 0.2)  # sizes of a fast-gradient-sign step

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in [0, 1] and their labels (N,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int) -> Digits:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        labels = torch.tensor(labels)
        train, test = train_test_split(
            range(len(labels)), test_size=1 / 3, stratify=labels, random_state=seed
        )
        return cls((images[train], labels[train]), (images[test], labels[test]))


def network(seed: int) -> nn.Module:
    """Four bilinear layers with ReLU between them; the seed fixes the initial weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇ℓ"""
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    return out, loss


def autograd_step(net: nn.Module, weight: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇(ℓ + λ‖∇ₓℓ‖²) by stock double backward."""
    x = x.detach().requires_grad_()
    out = net(x)
    losses = F.cross_entropy(out, y, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    loss = losses.mean() + weight * gradient.square().flatten(1).sum(1).mean()
    loss.backward()
    return out, loss


def sweeps_step(model: db.Penalised, weight: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇(ℓ + λ‖∇ₓℓ‖²) by four explicit sweeps."""
    out, penalty = model(x, y)
    loss = F.cross_entropy(out, y) + weight * penalty
    loss.backward()
    return out, loss


def penalised(net: nn.Module) -> db.Penalised:
    return db.Penalised(net, db.LossGradient("cross_entropy"))


def train(
    net: nn.Module, step: Step, digits: Digits, epochs: int, seed: int
) -> Iterator[tuple[int, float, float]]:
    """Train in place; after each epoch yield its number, mean loss and training accuracy."""
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    shuffle = torch.Generator().manual_seed(seed)
    images, labels = digits.train
    for epoch in range(1, epochs + 1):
        losses, hits = [], []
        for rows in torch.randperm(len(labels), generator=shuffle).split(BATCH):
            if len(rows) < BATCH:
                continue
            optimiser.zero_grad()
            out, loss = step(images[rows], labels[rows])
            optimiser.step()
            losses.append(loss.item())
            hits.append(accuracy(out, labels[rows]))
        yield epoch, statistics.fmean(losses), statistics.fmean(hits)


def accuracy(out: Tensor, labels: Tensor) -> float:
    return (out.argmax(1) == labels).float().mean().item()


def measure(net: nn.Module, digits: Digits, seed: int) -> dict[str, float]:
    """Accuracy on clean, noisy and attacked test images, and how steep the loss is there."""
    x, y = digits.test
    x = x.clone().requires_grad_()
    out = net(x)
    (gradient,) = torch.autograd.grad(F.cross_entropy(out, y, reduction="sum"), x)
    results = {
        "test accuracy": accuracy(out, y),
        "mean input-gradient norm": gradient.flatten(1).norm(dim=1).mean().item(),
    }
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for size in NOISES:
            seen = (x + size * noise).clamp(0, 1)
            results[f"accuracy, noise σ = {size}"] = accuracy(net(seen), y)
        for size in ATTACKS:
            seen = (x + size * gradient.sign()).clamp(0, 1)
            results[f"accuracy, FGSM ε = {size}"] = accuracy(net(seen), y)
    return results


def seconds_per_step(
    net: nn.Module, weight: float, digits: Digits, rounds: int = 30
) -> dict[str, float]:
    """Medians over interleaved rounds, so that a busy machine slows all three alike."""
    x, y = (values[:BATCH] for values in digits.train)
    steps = {
        "plain": partial(plain_step, net),
        "autograd": partial(autograd_step, net, weight),
        "doubleback": partial(sweeps_step, penalised(net), weight),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            net.zero_grad()
            start = time.perf_counter()
            step(x, y)
            if turn >= 3:  # the first rounds capture the graph and warm caches
                times[name].append(time.perf_counter() - start)
    net.zero_grad()
    return {name: statistics.median(values) for name, values in times.items()}
