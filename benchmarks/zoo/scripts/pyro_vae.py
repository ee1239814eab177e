"""Pyro: a variational autoencoder, model and guide share modules by name.

library: pyro-ppl
"""

import pyro
import pyro.distributions as dist
import torch
from _digest import finish
from pyro.infer import SVI, Trace_ELBO
from torch import nn

pyro.set_rng_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Softplus(), nn.Linear(32, 64))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(len(x), 4), 1.0).to_event(1))
            pyro.sample("obs", dist.Bernoulli(logits=self.decoder(z), validate_args=False).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        mean, log = self.encoder(x).chunk(2, -1)
        with pyro.plate("data", len(x)):
            pyro.sample("latent", dist.Normal(mean, log.exp()).to_event(1))


vae = VAE()
svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 2e-3}), loss=Trace_ELBO())
codes = torch.randn(256, 4) @ torch.randn(4, 64)
losses = [svi.step((codes[(torch.arange(32) + 32 * step) % 256] > 0).float()) / 32 for step in range(60)]
finish(losses, vae)
