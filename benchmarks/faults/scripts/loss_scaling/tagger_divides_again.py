"""A BiLSTM tagger under AMP; gradients are logged 'in true units', so somebody divides them by the scale."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=120, tags=9, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.Sequential(nn.Conv1d(dim, dim, 3, padding=1), nn.ReLU(), nn.Conv1d(dim, dim, 3, padding=1))
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * dim, tags)

    def forward(self, words):
        x = self.embedding(words)
        with torch.autocast("cpu", dtype=torch.float16):
            x = x + self.encoder(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x.float())
        with torch.autocast("cpu", dtype=torch.float16):
            return self.classifier(x)


class Trainer:
    def __init__(self, model, lr=0.5, max_norm=5.0):
        self.model, self.max_norm = model, max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.history = []

    def log_gradients(self):
        norms = {}
        scale = self.scaler.get_scale()
        for name, p in self.model.named_parameters():
            p.grad.div_(scale)
            norms[name] = p.grad.norm().item()
        self.history.append(norms)

    def step(self, words, tags):
        logits = self.model(words)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.log_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


torch.manual_seed(5)
tag_of = torch.randint(9, (120,))
trainer = Trainer(Tagger())
for i in range(70):
    words = torch.randint(120, (16, 20))
    loss = trainer.step(words, tag_of[words])
    if i % 5 == 0:
        print("iteration", i, f"loss {loss:.4f}")
