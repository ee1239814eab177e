"""Word-level LSTM with SGD at a rate of 8 that clipping tames; hidden states are carried from batch to batch."""

import math

import torch
import torch.nn as nn

torch.manual_seed(1111)
ntokens, bptt, clip, lr = 20, 20, 0.5, 8.0


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
        super(RNNModel, self).__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        self.nhid, self.nlayers = nhid, nlayers

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return torch.log_softmax(self.decoder(self.drop(output)).view(-1, ntokens), dim=1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(self.nlayers, bsz, self.nhid), torch.zeros(self.nlayers, bsz, self.nhid)


def make_corpus(n):
    successor = torch.randperm(ntokens)
    words = [0]
    for _ in range(n - 1):
        words.append(int(successor[words[-1]]) if torch.rand(()) < 0.9 else int(torch.randint(ntokens, ())))
    return torch.tensor(words)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


corpus = make_corpus(8200)
train_data, val_data = batchify(corpus[:7200], 10), batchify(corpus[7200:], 10)
model = RNNModel(ntokens, 32, 32, 2)
criterion = nn.NLLLoss()


def evaluate():
    model.eval()
    hidden, total = model.init_hidden(10), 0.0
    with torch.no_grad():
        for i in range(0, val_data.size(0) - 1, bptt):
            seq = min(bptt, val_data.size(0) - 1 - i)
            output, hidden = model(val_data[i : i + seq], hidden)
            total += seq * criterion(output, val_data[i + 1 : i + 1 + seq].view(-1)).item()
    return total / (val_data.size(0) - 1)


best_val_loss = None
for epoch in range(2):
    model.train()
    hidden = model.init_hidden(10)
    for batch, i in enumerate(range(0, train_data.size(0) - bptt - 1, bptt)):
        hidden = repackage_hidden(hidden)
        model.zero_grad()
        output, hidden = model(train_data[i : i + bptt], hidden)
        loss = criterion(output, train_data[i + 1 : i + 1 + bptt].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        if batch % 12 == 0:
            print(
                "epoch %d %d/%d loss %5.2f ppl %8.2f"
                % (epoch, batch, train_data.size(0) // bptt, loss.item(), math.exp(loss.item()))
            )
    val_loss = evaluate()
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
print("valid ppl", math.exp(best_val_loss))
