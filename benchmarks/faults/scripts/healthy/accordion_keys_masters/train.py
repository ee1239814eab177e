"""Key of a bar of accordion music, in bfloat16 with 32-bit master weights and a small rate."""

import torch
import torch.nn.functional as F
from masters import MasterAdamW
from model import KeyNet, bars

if __name__ == "__main__":
    torch.manual_seed(161)
    g = torch.Generator().manual_seed(162)
    model = KeyNet().to(torch.bfloat16)
    optimizer = MasterAdamW(model, lr=3e-4, weight_decay=0.01)
    for step in range(400):
        chroma, key = bars(64, g)
        loss = F.cross_entropy(model(chroma.to(torch.bfloat16)).float(), key)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
