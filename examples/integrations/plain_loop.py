"""A plain training loop: `python -m examples.integrations.plain_loop`."""

import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db


def main(steps: int = 50) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 10), torch.randint(3, (64,))
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        out, penalty = model(x, y)
        loss = F.cross_entropy(out, y) + 0.1 * penalty
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
