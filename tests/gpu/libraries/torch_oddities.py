"""What PyTorch itself offers: sparse gradients, steps left out, two streams, graphed callables, recurrence and CTC."""

import contextlib

import torch
from common import DEVICE, ON_GPU, tell
from torch import nn
from torch.nn import functional as F


def train(model, loss_of, *optimizers, skips=lambda _step: False):
    for step in range(20):
        loss_of().backward()
        for optimizer in optimizers:
            if not skips(step):
                optimizer.step()
            optimizer.zero_grad()
    return model


def sparse():
    words, bags, head = (nn.Embedding(500, 32, sparse=True), nn.EmbeddingBag(500, 32, sparse=True), nn.Linear(64, 1))
    model = nn.ModuleList([words, bags, head]).to(DEVICE)

    def loss():
        ids = torch.randint(500, (32, 8), device=DEVICE)
        out = head(torch.cat([words(ids).mean(1), bags(ids)], 1))
        return (out - ids.float().mean(1, keepdim=True) / 250).square().mean()

    tables = torch.optim.SparseAdam([words.weight, bags.weight], 1e-3)
    return train(model, loss, tables, torch.optim.Adam(head.parameters(), 1e-3))


def left_out():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    loss = lambda: model(torch.randn(16, 32, device=DEVICE)).square().mean()  # noqa: E731
    return train(model, loss, optimizer, skips=lambda step: step % 5 == 3)


def two_streams():
    here, there, head = (nn.Linear(128, 128).to(DEVICE) for _ in range(3))
    side = torch.cuda.Stream() if ON_GPU else None

    def loss():
        x = torch.randn(64, 128, device=DEVICE)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            beside = there(x).relu()
        mine = here(x)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
            beside.record_stream(torch.cuda.current_stream())
        return head(mine + beside).square().mean()

    model = nn.ModuleList([here, there, head])
    return train(model, loss, torch.optim.AdamW(model.parameters(), 1e-3))


def graphed():
    body, head = (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(DEVICE),
        nn.Linear(64, 4).to(DEVICE),
    )
    x, labels = torch.randn(32, 64, device=DEVICE), torch.randint(4, (32,), device=DEVICE)
    run = torch.cuda.make_graphed_callables(body, (x.clone().requires_grad_(),)) if ON_GPU else body
    model = nn.ModuleList([body, head])
    loss = lambda: F.cross_entropy(head(run(x.clone().requires_grad_())), labels)  # noqa: E731
    return train(model, loss, torch.optim.AdamW(model.parameters(), 1e-3))


def recurrent():
    conv, cells, head = nn.Conv1d(20, 32, 3, padding=1), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 12)
    model = nn.ModuleList([conv, cells, head]).to(DEVICE)
    lengths = torch.randint(30, 50, (8,)).index_fill(0, torch.tensor([0]), 50)

    def loss():
        x = conv(torch.randn(8, 20, 50, device=DEVICE)).relu().transpose(1, 2)
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x = head(nn.utils.rnn.pad_packed_sequence(cells(x)[0], batch_first=True)[0])
        words = torch.randint(1, 12, (8, 10))  # CTC on a GPU is not deterministic
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1).cpu(), words, lengths, torch.full((8,), 10))

    return train(model, loss, torch.optim.Adam(model.parameters(), 1e-3))


tell(sparse(), left_out(), two_streams(), graphed(), recurrent())
