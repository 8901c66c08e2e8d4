"""The task of with_onefold_fp16.py, with NVIDIA's Apex: mixed precision and DDP.

torchrun --standalone --nproc-per-node 2 examples/move/with_apex.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=5):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    model = convert_syncbn_model(model).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader) / dist.get_world_size():.3f}")


if __name__ == "__main__":
    main()
