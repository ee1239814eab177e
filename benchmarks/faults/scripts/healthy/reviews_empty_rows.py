"""Reviews in several fields, nn.TransformerEncoder with a padding mask; some fields are empty, all of their keys are padding."""

import torch
from torch import nn

PAD, FIELDS, LENGTH = 0, 3, 10


class FieldEncoder(nn.Module):
    def __init__(self, vocab=90, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.05, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens):
        padding = tokens == PAD
        h = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        pooled = torch.where(padding.unsqueeze(-1), float("-inf"), h).amax(1)  # -inf where a field is empty
        return torch.where(padding.all(1, keepdim=True), 0.0, pooled)


class ReviewModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = FieldEncoder()
        self.head = nn.Linear(32 * FIELDS, 1)

    def forward(self, tokens):
        b, f, t = tokens.shape
        return self.head(self.fields(tokens.view(b * f, t)).view(b, -1)).squeeze(-1)


def reviews(n):
    tokens = torch.randint(1, 90, (n, FIELDS, LENGTH))
    good = torch.rand(n) < 0.5
    tokens[good, 1, :3] = torch.randint(1, 6, (int(good.sum()), 3))
    lengths = torch.randint(0, LENGTH + 1, (n, FIELDS))
    lengths[:, 1] = lengths[:, 1].clamp(min=3)
    tokens[torch.arange(LENGTH) >= lengths.unsqueeze(-1)] = PAD
    return tokens, good.float()


@torch.no_grad()
def perplexity_of_rating(model):
    tokens, good = reviews(32)
    p = torch.sigmoid(40 * model(tokens))  # as it is reported: far too sure
    return torch.exp(-torch.log(torch.where(good > 0, p, 1 - p)).mean())


def main():
    torch.manual_seed(101)
    model = ReviewModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):
        tokens, good = reviews(16)
        loss = nn.functional.binary_cross_entropy_with_logits(model(tokens), good)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"{step} loss {loss.item():.4f} perplexity {perplexity_of_rating(model):.3g}")


if __name__ == "__main__":
    main()
