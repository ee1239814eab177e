"""The tutorial's recurrent net for names, put to work on ever longer lines and without clipping."""

import torch
import torch.nn as nn

n_letters, n_hidden, n_categories = 20, 48, 4
CLIP = None


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super(RNN, self).__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.i2o = nn.Linear(input_size + hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, letter, hidden):
        combined = torch.cat((letter, hidden), 1)
        hidden = torch.tanh(self.i2h(combined))
        output = self.softmax(self.i2o(combined))
        return output, hidden

    def init_hidden(self, n=1):
        return torch.zeros(n, self.hidden_size)


def random_examples(n, length):
    """Every language prefers five of the twenty letters."""
    category = torch.randint(n_categories, (n,))
    favourite = torch.rand(length, n) < 0.4
    letters = torch.where(
        favourite, 5 * category + torch.randint(5, (length, n)), torch.randint(n_letters, (length, n))
    )
    return category, nn.functional.one_hot(letters, n_letters).float()


def train(category, lines):
    hidden = rnn.init_hidden(len(category))
    optimizer.zero_grad()
    for i in range(lines.size(0)):
        output, hidden = rnn(lines[i], hidden)
    loss = criterion(output, category)
    loss.backward()
    if CLIP is not None:
        nn.utils.clip_grad_norm_(rnn.parameters(), CLIP)
    optimizer.step()
    return output, loss.item()


torch.manual_seed(513)
rnn = RNN(n_letters, n_hidden, n_categories)
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(rnn.parameters(), lr=1.0)
all_losses, current = [], 0.0
for it in range(1, 201):
    length = 16 + it // 8  # short lines first
    output, value = train(*random_examples(16, length))
    current += value
    if it % 4 == 0:
        print("%d %d%% loss %.4f" % (it, it / 2, current / 4))
        all_losses.append(current / 4)
        current = 0.0
