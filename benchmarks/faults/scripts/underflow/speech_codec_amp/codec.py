import torch.nn as nn


class Codec(nn.Module):
    """Frame-wise autoencoder: 256 samples to 24 numbers and back."""

    def __init__(self, frame=256, hidden=160, code=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(frame, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, frame))

    def forward(self, x):
        return self.decoder(self.encoder(x))
