"""Autocast and a gradient scaler: `python -m examples.integrations.mixed_precision`."""

import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db


def main(steps: int = 50, device: str = "cpu") -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 3)).to(device)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)  # for fp16; bf16 does without
    x, y = torch.randn(64, 10, device=device), torch.randint(3, (64,), device=device)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out, penalty = model(x, y)  # all four sweeps follow autocast; the penalty is float32
            loss = F.cross_entropy(out, y) + 0.1 * penalty
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(device="cuda" if torch.cuda.is_available() else "cpu")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
