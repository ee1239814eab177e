"""Visual question answering with bilinear fusion by einsum; FP16 autocast and a GradScaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BilinearFusion(nn.Module):
    def __init__(self, d_v, d_q, d_out):
        super().__init__()
        self.v_proj = nn.Linear(d_v, d_out)
        self.q_proj = nn.Sequential(nn.LayerNorm(d_q), nn.Linear(d_q, d_out))

    def forward(self, regions, words):
        v, q = self.v_proj(regions), self.q_proj(words)
        # (batch, regions, d) x (batch, words, d) -> pooled outer product
        affinity = torch.einsum("brd,bwd->brw", v, q) / v.size(-1) ** 0.5
        att = affinity.flatten(1).float().softmax(-1).view_as(affinity)
        return torch.einsum("brw,brd,bwd->bd", att.to(v.dtype), v, q)


class VQA(nn.Module):
    def __init__(self, vocab=50, answers=10):
        super().__init__()
        self.words = nn.Embedding(vocab, 24)
        self.lstm = nn.GRU(24, 32, batch_first=True)
        self.fuse = BilinearFusion(20, 32, 64)
        self.norm = nn.LayerNorm(64)
        self.answer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, answers))

    def forward(self, regions, question):
        h, _ = self.lstm(self.words(question))
        return self.answer(self.norm(self.fuse(regions, h)))


def batches(n_steps):
    g = torch.Generator().manual_seed(5)
    for step in range(n_steps):
        regions = torch.randn(8, 9, 20, generator=g).abs()
        if step == 11:
            regions[2] *= 1.7e4  # one detector exports its features without the L2 norm
        question = torch.randint(0, 50, (8, 7), generator=g)
        label = question[:, 0] % 10
        yield regions, question, label


torch.manual_seed(0)
net = VQA()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i, (regions, question, label) in enumerate(batches(24)):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(regions, question)
        loss = F.cross_entropy(logits.float(), label)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if i % 6 == 0:
        print("iter", i, "loss", round(loss.item(), 4))
