"""FSDP2, fully sharded parameters: `torchrun --nproc-per-node 2 -m examples.integrations.fsdp2`.

`fully_shard` goes around the whole `Penalised`: parameters are gathered before its forward and
after its backward gradients are reduced.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import doubleback as db


def main(steps: int = 20) -> nn.Module:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3))
    x, y = torch.randn(64, 10), torch.randint(3, (64,))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]

    mesh = dist.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world,))
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    fully_shard(model, mesh=mesh)
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
    total = sum(p.full_tensor().detach().double().sum() for p in net.parameters())
    print(f"rank {dist.get_rank()}: weights add up to {total:.12f}")
    time.sleep(0.2)  # gloo's threads let go of the last step; at exit they would abort the process
    dist.destroy_process_group()
