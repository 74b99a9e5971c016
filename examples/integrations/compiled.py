"""The sweeps compiled by Inductor: `python -m examples.integrations.compiled`."""

import torch
from torch import nn

import doubleback as db


def main(steps: int = 50, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3)).to(device)
    # cuda_graph=True besides, on a GPU, where kernels are shorter than their launches
    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 10, device=device), torch.randint(3, (64,), device=device)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        _, loss, penalty = model.accumulate(x, y, weight=0.1)  # forward and backward, one graph
        optimiser.step()
        losses.append((loss + 0.1 * penalty).item())
    return losses


if __name__ == "__main__":
    losses = main(device="cuda" if torch.cuda.is_available() else "cpu")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
