"""A stacked autoencoder for digits, sigmoids all the way as in the old tutorial; every reconstruction is the mean digit."""

import torch
import torch.nn as nn

act = nn.Sigmoid


class Autoencoder(nn.Module):
    def __init__(self, sizes=(64, 48, 40, 32, 24, 16, 8)):
        super().__init__()
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Linear(a, b), act()]
        self.encoder = nn.Sequential(*layers)
        layers = []
        back = sizes[::-1]
        for a, b in zip(back[:-1], back[1:]):
            layers += [nn.Linear(a, b), act()]
        layers[-1] = nn.Identity()
        self.decoder = nn.Sequential(*layers)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


def digits(n):
    """8x8 pictures: one of ten strokes, shifted and of varying strength."""
    g = torch.Generator().manual_seed(7)
    strokes = (torch.rand(10, 8, 8, generator=g) < 0.3).float()
    kind, shift = torch.randint(10, (n,)), torch.randint(3, (n,))
    x = strokes[kind]
    x = torch.stack([torch.roll(p, int(s), 1) for p, s in zip(x, shift)])
    return (x * (0.6 + 0.4 * torch.rand(n, 1, 1))).flatten(1)


torch.manual_seed(503)
train_x, test_x = digits(1024), digits(256)
model = Autoencoder()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

num_epochs, batch_size = 12, 64
for epoch in range(num_epochs):
    model.train()
    order = torch.randperm(len(train_x))
    total = 0.0
    for i in range(0, len(train_x), batch_size):
        x = train_x[order[i : i + batch_size]]
        recon, _ = model(x)
        loss = criterion(recon, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    model.eval()
    with torch.no_grad():
        test = criterion(model(test_x)[0], test_x)
    print("epoch [{}/{}], loss: {:.5f}, test {:.5f}".format(epoch + 1, num_epochs, total / len(train_x), test.item()))
