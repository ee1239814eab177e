"""A healthy training that is over after five steps, as smoke tests are."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(256, 32), torch.randint(10, (256,))

for _ in range(5):
    batch = torch.randint(256, (32,))
    loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
