"""BoTorch: a process fitted with Adam, then expected improvement maximised, three rounds.

library: botorch
"""

import torch
from _digest import finish
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.optim.fit import fit_gpytorch_mll_torch
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
x = torch.rand(8, 2, dtype=torch.double)


def objective(x):
    return 1 - (x - 0.4).square().sum(-1, keepdim=True)


y = objective(x)
losses = []
for _ in range(3):
    model = SingleTaskGP(x, y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(
        mll,
        optimizer=fit_gpytorch_mll_torch,
        optimizer_kwargs={"step_limit": 40, "callback": lambda _, r: losses.append(r.fval)},
    )
    candidate, _ = optimize_acqf(
        LogExpectedImprovement(model, best_f=y.max()),
        bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double),
        q=1,
        num_restarts=2,
        raw_samples=16,
        options={"maxiter": 20},
    )
    x, y = torch.cat([x, candidate]), torch.cat([y, objective(candidate)])
finish(losses, model, {"x": x, "y": y})
