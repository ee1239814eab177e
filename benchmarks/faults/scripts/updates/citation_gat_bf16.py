# Node labels in a citation-like graph, GAT layers in bfloat16, long low-rate fine-tuning phase
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(21)
NODES, CLASSES, FEAT = 240, 5, 32
label = torch.randint(CLASSES, (NODES,))
same = label[:, None] == label[None, :]
adj = torch.rand(NODES, NODES) < torch.where(same, 0.06, 0.012)
adj = adj | adj.t() | torch.eye(NODES, dtype=torch.bool)
x = F.one_hot(label, CLASSES).float() @ torch.randn(CLASSES, FEAT) * 0.35 + torch.randn(NODES, FEAT)
train = torch.rand(NODES) < 0.5


class GAT(nn.Module):
    def __init__(self, i, o, heads=4):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.src, self.dst = nn.Linear(o, heads), nn.Linear(o, heads)
        self.heads = heads

    def forward(self, x, adj):
        h = self.lin(x)
        e = F.leaky_relu(self.src(h)[:, None] + self.dst(h)[None], 0.2)
        a = e.float().masked_fill(~adj[..., None], float("-inf")).softmax(1).to(h.dtype)
        h = h.view(len(x), self.heads, -1)
        return torch.einsum("ijh,jhd->ihd", a, h).flatten(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.g1, self.g2 = GAT(FEAT, 32), GAT(32, 32)
        self.n1, self.n2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x, adj):
        x = F.elu(self.n1(self.g1(x, adj)))
        x = x + F.elu(self.n2(self.g2(x, adj)))
        return self.out(x)


dtype = torch.bfloat16
net = Net().to(dtype)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01)
for epoch in range(250):
    logits = net(x.to(dtype), adj)
    loss = F.cross_entropy(logits[train].float(), label[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 5 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
