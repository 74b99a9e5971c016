"""DistributedDataParallel: `torchrun --nproc-per-node 2 -m examples.integrations.ddp`.

DDP goes around `Penalised`, and gradients are averaged as for any module.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import doubleback as db


def main(steps: int = 20) -> nn.Module:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and the same data everywhere
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
    x, y = torch.randn(64, 10), torch.randint(3, (64,))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]  # of which each process takes its share

    model = DistributedDataParallel(db.Penalised(net, db.LossGradient("cross_entropy")))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        out, penalty = model(x, y)
        (F.cross_entropy(out, y) + 0.1 * penalty).backward()
        optimiser.step()
    return net


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    net = main()
    total = sum(p.detach().double().sum() for p in net.parameters())
    print(f"rank {dist.get_rank()}: weights add up to {total:.12f}")
    time.sleep(0.2)  # gloo's threads let go of the last step; at exit they would abort the process
    dist.destroy_process_group()
