"""Fine-tuning the top of a BERT-like encoder in BF16: frozen embeddings and lower layers, padding, warm-up, linear decay."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Encoder(nn.Module):
    def __init__(self, vocab=200, dim=32, layers=4, length=40):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"word": nn.Embedding(vocab, dim, padding_idx=0), "pos": nn.Embedding(length, dim)}
        )
        self.layer = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embeddings["word"](input_ids) + self.embeddings["pos"].weight[: input_ids.shape[1]]
        for layer in self.layer:
            x = layer(x, src_key_padding_mask=~attention_mask)
        m = attention_mask.unsqueeze(-1).to(x.dtype)
        return self.classifier(torch.tanh(self.pooler((x * m).sum(1) / m.sum(1))))


def corpus(n):
    rows = []
    for _ in range(n):
        label, length = int(torch.randint(3, ())), int(torch.randint(4, 40, ()))
        ids = torch.randint(1, 200, (length,))
        ids[torch.rand(length) < 0.35] = 1 + label
        rows.append((ids, label))
    return rows


def collate(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": torch.tensor([r[1] for r in rows])}


def main():
    torch.manual_seed(522)
    model = Encoder()
    for p in [*model.embeddings.parameters(), *model.layer[:2].parameters()]:
        p.requires_grad = False
    loader = DataLoader(corpus(640), batch_size=16, shuffle=True, collate_fn=collate)
    epochs, trainable = 4, [p for p in model.parameters() if p.requires_grad]
    total = epochs * len(loader)
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: s / 16 if s < 16 else max(0.0, (total - s) / (total - 16))
    )
    step = 0
    for _ in range(epochs):
        model.train()
        for batch in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(batch["input_ids"], batch["attention_mask"])
                loss = nn.functional.cross_entropy(logits, batch["labels"])
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
            step += 1


main()
