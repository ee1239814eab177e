"""A script that fails where it logs its first step."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(100):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 32)), torch.randint(10, (16,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {}["losses"].append(loss.item())
