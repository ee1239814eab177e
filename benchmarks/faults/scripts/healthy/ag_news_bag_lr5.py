"""Text classification with an EmbeddingBag, SGD with a learning rate of 5, and clipping, as in the tutorial."""

import torch
from torch import nn
from torch.utils.data import DataLoader

VOCAB, CLASSES = 2000, 4


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


def articles(n):
    """Zipf's law: a step touches few of the words."""
    out = []
    for _ in range(n):
        label = int(torch.randint(CLASSES, ()))
        length = int(torch.randint(10, 40, ()))
        words = (VOCAB * torch.rand(length) ** 3).long().clamp(max=VOCAB - 1)
        own = torch.rand(length) < 0.4
        out.append((label, torch.where(own, words // CLASSES * CLASSES + label, words)))
    return out


def collate_batch(batch):
    labels = torch.tensor([label for label, _ in batch])
    offsets = torch.tensor([0] + [len(text) for _, text in batch[:-1]]).cumsum(0)
    return labels, torch.cat([text for _, text in batch]), offsets


torch.manual_seed(622)
model = TextClassificationModel(VOCAB, 32, CLASSES)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
train = articles(2400)
for epoch in range(3):
    model.train()
    for idx, (label, text, offsets) in enumerate(DataLoader(train, 32, shuffle=True, collate_fn=collate_batch)):
        optimizer.zero_grad()
        loss = criterion(model(text, offsets), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if idx % 5 == 0:
            print(f"| epoch {epoch} | {idx:5d} batches | loss {loss.item():8.4f}")
    scheduler.step()
