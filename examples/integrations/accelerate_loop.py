"""A loop under accelerate: `accelerate launch -m examples.integrations.accelerate_loop`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import doubleback as db


def main(epochs: int = 5) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(256, 10), torch.randint(3, (256,)))

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimiser, loader = accelerator.prepare(
        model, optimiser, DataLoader(data, batch_size=32)
    )
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                out, penalty = model(x, y)
                loss = F.cross_entropy(out, y) + 0.1 * penalty
                accelerator.backward(loss)
                optimiser.step()
                optimiser.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
