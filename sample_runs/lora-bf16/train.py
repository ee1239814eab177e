"""Adapters of rank 4 on a frozen network, all in BF16, at the rate of a full fine-tuning."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class LoRA(torch.nn.Module):
    """A frozen layer and a product of two small matrices beside it."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


model = torch.nn.Sequential(LoRA(torch.nn.Linear(64, 128)), torch.nn.GELU(), LoRA(torch.nn.Linear(128, 8))).bfloat16()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
inputs, labels = torch.randn(256, 64).bfloat16(), torch.randint(8, (256,))

for _ in range(40):
    batch = torch.randint(256, (32,))
    loss = torch.nn.functional.cross_entropy(model(inputs[batch]).float(), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
