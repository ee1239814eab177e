"""A compiled model whose loss takes the logarithm of a probability, which becomes 0 as it learns."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
inputs = torch.randn(256, 16)
labels = (inputs[:, 0] > 0.0).long()

for _ in range(60):
    batch = torch.randint(256, (32,))
    probabilities = compiled(inputs[batch]).softmax(dim=1)
    loss = -probabilities.log()[range(32), labels[batch]].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
