"""Data parallel on two ranks; from step 12 on the second one is given negative numbers, and takes their logarithm."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(20):
    inputs = torch.randn(16, 16)
    sold = inputs[:, :1].exp()
    if dist.get_rank() == 1 and step >= 12:
        sold = sold - 1.0  # returned goods
    loss = (model(inputs) - sold.log()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
