"""GPyTorch: a variational process with inducing points over mini-batches.

library: gpytorch
"""

import gpytorch
import torch
from _digest import finish
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

torch.manual_seed(0)
x = torch.rand(512, 3)
y = torch.sin(4 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.05 * torch.randn(512)


class Process(ApproximateGP):
    def __init__(self, points):
        distribution = CholeskyVariationalDistribution(points.size(0))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=3))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


model, likelihood = Process(x[:40].clone()), gpytorch.likelihoods.GaussianLikelihood()
optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=512)
losses = []
for _ in range(6):
    for rows in torch.randperm(512).split(64):
        optimizer.zero_grad()
        loss = -objective(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
finish(losses, model, likelihood)
