import torch.nn as nn


class Body(nn.Module):
    def __init__(self, vocabulary, d):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.low = nn.GRU(d, d, batch_first=True)
        self.high = nn.GRU(d, d, batch_first=True)

    def forward(self, tokens):
        return self.high(self.low(self.embed(tokens))[0])[0]


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=40, d=32, classes=3):
        super().__init__()
        self.body = Body(vocabulary, d)
        self.decoder = nn.Linear(d, vocabulary)
        self.classifier = nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, classes))

    def forward(self, tokens, task):
        h = self.body(tokens)
        return self.decoder(h) if task == "lm" else self.classifier(h.mean(1))
