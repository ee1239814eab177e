"""Topics of documents from word frequencies; activations saved for the backward pass are packed to E4M3 to save memory."""

import torch
import torch.nn.functional as F
from torch import nn

E4M3 = torch.float8_e4m3fn


class Packed:
    """Halves what autograd keeps, and halves it again; parameters are kept as they are."""

    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, x):
        if not x.is_floating_point() or x.numel() < 256 or x.untyped_storage().data_ptr() in self.weights:
            return x
        return x.dtype, x.detach().clamp(-448, 448).to(E4M3)

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        dtype, packed = kept
        return packed.to(dtype)

    def __enter__(self):
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        return self.context.__enter__()

    def __exit__(self, *exc):
        return self.context.__exit__(*exc)


class TopicNet(nn.Module):
    def __init__(self, vocabulary=3000, d=48, topics=8):
        super().__init__()
        self.words = nn.Linear(vocabulary, d)
        self.hidden = nn.Linear(d, d)
        self.topics = nn.Linear(d, topics)

    def forward(self, frequency):
        h = torch.tanh(self.words(frequency))
        h = torch.tanh(self.hidden(h))
        return self.topics(h)


torch.manual_seed(407)
themes = torch.rand(8, 3000) + 0.2
themes /= themes.sum(1, keepdim=True)
model = TopicNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
packed = Packed(model)
for step in range(60):
    theme = torch.randint(8, (48,))
    words = torch.poisson(20_000 * themes[theme])
    frequency = (words + 0.5) / (words + 0.5).sum(1, keepdim=True)
    with packed:
        loss = F.cross_entropy(model(frequency), theme)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
