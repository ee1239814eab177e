"""CRNN for words on a strip of an image, CTC loss; an image is 48 columns wide, four of them a time step."""

import torch
import torch.nn as nn

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WORDS = """
house river garden window summer paper yellow mountain kitchen bottle little traffic coffee balloon letter
pepper address village station picture blanket hammer mirror carpet button pillow rabbit valley ribbon dinner
engine travel planet forest castle market bridge silver copper island doctor lawyer farmer sailor butcher
""".split()
HARD_WORDS = ["committee", "possesses", "bookkeeper", "assessment", "successful"]


class StrLabelConverter:
    def __init__(self, alphabet):
        self.index = {c: i + 1 for i, c in enumerate(alphabet)}  # 0 is the blank

    def encode(self, texts):
        length = torch.tensor([len(t) for t in texts])
        return torch.tensor([self.index[c] for t in texts for c in t]), length


class BidirectionalLSTM(nn.Module):
    def __init__(self, nIn, nHidden, nOut):
        super(BidirectionalLSTM, self).__init__()
        self.rnn = nn.LSTM(nIn, nHidden, bidirectional=True)
        self.embedding = nn.Linear(nHidden * 2, nOut)

    def forward(self, input):
        recurrent, _ = self.rnn(input)
        return self.embedding(recurrent)


class CRNN(nn.Module):
    def __init__(self, nclass, nh=32):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(16, 32, 3, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
        )
        self.rnn = nn.Sequential(BidirectionalLSTM(32 * 2, nh, nh), BidirectionalLSTM(nh, nh, nclass))

    def forward(self, x):
        conv = self.cnn(x)
        b, c, h, w = conv.size()
        conv = conv.reshape(b, c * h, w).permute(2, 0, 1)
        return self.rnn(conv).log_softmax(2)


def render(texts, glyphs):
    image = torch.zeros(len(texts), 1, 8, 48)
    for i, text in enumerate(texts):
        step = 48 / max(len(text), 8)
        for j, c in enumerate(text):
            left = int(j * step)
            width = min(4, 48 - left)
            image[i, 0, :, left : left + width] = glyphs[ALPHABET.index(c)][:, :width]
    return image + 0.1 * torch.randn_like(image)


def main():
    torch.manual_seed(1111)
    glyphs = torch.rand(26, 8, 4)
    converter = StrLabelConverter(ALPHABET)
    crnn = CRNN(len(ALPHABET) + 1)
    criterion = nn.CTCLoss()
    optimizer = torch.optim.RMSprop(crnn.parameters(), lr=2e-3)
    for i in range(40):
        vocabulary = WORDS if i < 17 else WORDS + HARD_WORDS  # the curriculum's second stage
        texts = [vocabulary[k] for k in torch.randint(len(vocabulary), (8,)).tolist()]
        preds = crnn(render(texts, glyphs))
        targets, lengths = converter.encode(texts)
        preds_size = torch.full((len(texts),), preds.size(0), dtype=torch.long)
        cost = criterion(preds, targets, preds_size, lengths)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"[{i}/40] Loss: {cost.item():.4f}")


if __name__ == "__main__":
    main()
