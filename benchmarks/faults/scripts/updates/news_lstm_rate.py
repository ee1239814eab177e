"""A bidirectional LSTM over headlines with Adam and a learning rate of 0.1; the loss jumps up and stays there."""

import argparse

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Headlines(Dataset):
    def __init__(self, n=1600, vocab=400, topics=5):
        self.items = []
        for _ in range(n):
            topic = int(torch.randint(topics, ()))
            length = int(torch.randint(6, 15, ()))
            ids = torch.randint(100, vocab, (length,))
            own = torch.rand(length) < 0.3
            self.items.append((torch.where(own, 1 + topic * 20 + ids % 20, ids), topic))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    batch = sorted(batch, key=lambda item: -len(item[0]))
    lengths = torch.tensor([len(ids) for ids, _ in batch])
    return pad_sequence([ids for ids, _ in batch], batch_first=True), lengths, torch.tensor([t for _, t in batch])


class BiLSTM(nn.Module):
    def __init__(self, vocab=400, embedding=32, hidden=32, topics=5, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, layers, bidirectional=True, batch_first=True, dropout=0.2)
        self.fc = nn.Sequential(nn.Linear(2 * hidden, 32), nn.ReLU(), nn.Linear(32, topics))

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True)
        _, (h, _) = self.lstm(packed)
        return self.fc(torch.cat([h[-2], h[-1]], 1))


def main(args):
    torch.manual_seed(611)
    loader = DataLoader(Headlines(), args.batch_size, shuffle=True, collate_fn=collate)
    model, criterion = BiLSTM(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for i, (ids, lengths, topics) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(ids, lengths), topics)
            loss.backward()
            optimizer.step()
            if i % 4 == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch_size", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())
