"""A model in .half() made NaN with Adam, so eps was raised as the forum says. Now nothing is NaN, and little is learnt."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CaptionEncoder(nn.Module):
    """Distils the features of a picture, of unit length, from its caption."""

    def __init__(self, vocab=300, width=64, features=32):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, width)
        self.resblocks = nn.ModuleList(
            nn.ModuleDict(
                {"ln": nn.LayerNorm(width), "c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)}
            )
            for _ in range(3)
        )
        self.ln_post, self.text_projection = nn.LayerNorm(width), nn.Linear(width, features, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.05)

    def forward(self, tokens):
        x = self.token_embedding(tokens).mean(1)
        for block in self.resblocks:
            x = x + block["c_proj"](F.relu(block["c_fc"](block["ln"](x))))
        return F.normalize(self.text_projection(self.ln_post(x)).float(), dim=-1)


def pairs(n, vectors):
    tokens = torch.randint(300, (n, 6))
    return tokens, F.normalize(vectors[tokens].mean(1), dim=-1)


def main(steps=150, eps=1e-3):
    torch.manual_seed(609)
    vectors = torch.randn(300, 32)
    model = CaptionEncoder().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    for step in range(steps):
        tokens, image = pairs(64, vectors)
        loss = F.mse_loss(model(tokens), image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"{step:4d} loss {loss.item():.5f}")


main()
