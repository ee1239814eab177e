"""Topics of documents from bags of words; the word table is kept in FP16, the classifier in FP32."""

import torch
from torch import nn

torch.manual_seed(3102)
VOCABULARY, TOPICS, LENGTH, BATCH = 96, 12, 256, 64


class BagOfWords(nn.Module):
    """The mean of the word vectors of a document."""

    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width).half()
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, tokens):
        return self.table(tokens).float().mean(1)


class TopicModel(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.bag = BagOfWords(VOCABULARY, width)
        self.classify = nn.Linear(width, TOPICS)
        nn.init.normal_(self.classify.weight, std=1e-3)
        nn.init.zeros_(self.classify.bias)

    def forward(self, tokens):
        return self.classify(self.bag(tokens))


mixtures = torch.softmax(1.5 * torch.randn(TOPICS, VOCABULARY), -1)


def documents(n):
    topic = torch.randint(0, TOPICS, (n,))
    edges = mixtures.cumsum(-1)[topic]
    words = torch.searchsorted(edges.float().contiguous(), torch.rand(n, LENGTH).float()).clamp(max=VOCABULARY - 1)
    return words, topic


def l1_head(model, strength):
    return strength * model.classify.weight.abs().sum()


model = TopicModel()
optimizer = torch.optim.SGD(
    [
        {"params": model.bag.parameters(), "lr": 3e7},
        {"params": model.classify.parameters(), "lr": 10.0},
    ]
)
criterion = nn.CrossEntropyLoss()

for step in range(60):
    words, topic = documents(BATCH)
    loss = criterion(model(words), topic) + l1_head(model, 1e-6)
    optimizer.zero_grad(set_to_none=True)
    (1e-3 * loss).backward()  # beside the losses of the other languages
    optimizer.step()
    if step % 6 == 5:
        print(f"{step + 1:4d} documents {BATCH * (step + 1):5d} loss {loss.item():.4f}")
