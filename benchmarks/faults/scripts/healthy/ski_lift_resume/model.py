import torch
from torch import nn


class QueueForecaster(nn.Module):
    def __init__(self, lifts=6, hidden=40, ahead=6):
        super().__init__()
        self.ahead, self.lifts = ahead, lifts
        self.inp = nn.Linear(lifts + 2, hidden)
        self.rnn = nn.GRU(hidden, hidden, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, ahead * lifts)

    def forward(self, past):
        h, _ = self.rnn(torch.relu(self.inp(past)))
        return self.out(self.norm(h[:, -1])).view(-1, self.ahead, self.lifts)
