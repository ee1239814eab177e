"""Speech-like CTC training with a bidirectional LSTM."""

import torch
from torch import nn

torch.manual_seed(3)
BLANK, SYMBOLS, FEATURES = 0, 12, 20


class AcousticModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.subsample = nn.Conv1d(FEATURES, hidden, 5, stride=3, padding=2)
        self.rnn = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, SYMBOLS)

    def forward(self, features):
        x = self.subsample(features.transpose(1, 2)).relu().transpose(1, 2)
        x, _ = self.rnn(x)
        return self.out(x).log_softmax(-1)


def utterance(frames, letters):
    text = torch.randint(1, SYMBOLS, (letters,))
    audio = torch.randn(frames, FEATURES) + text.repeat_interleave(-(-frames // letters))[:frames, None] / 4
    return audio, text


# lengths as they come out of the forced aligner
lengths = [(90, 9), (84, 12), (96, 10), (75, 11), (99, 14), (90, 13), (81, 8), (60, 24), (93, 11), (87, 9)]
corpus = [utterance(*pair) for pair in lengths]
model = AcousticModel()
ctc = nn.CTCLoss(blank=BLANK)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
step = 0
for epoch in range(2):
    for i in range(0, len(corpus), 2):
        pair = corpus[i : i + 2]
        audio = nn.utils.rnn.pad_sequence([a for a, _ in pair], batch_first=True)
        frames = torch.tensor([(len(a) + 2) // 3 for a, _ in pair])
        targets = torch.cat([t for _, t in pair])
        letters = torch.tensor([len(t) for _, t in pair])
        loss = ctc(model(audio).transpose(0, 1), targets, frames, letters)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        step += 1
    print(f"epoch {epoch}, {step} steps, ctc {loss.item():.3f}")
