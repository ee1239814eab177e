"""sbi: neural posterior estimation with a masked autoregressive flow.

library: sbi
"""

import contextlib
import io

import torch
from _digest import finish
from sbi.inference import NPE
from sbi.utils import BoxUniform

torch.manual_seed(0)
prior = BoxUniform(-2 * torch.ones(2), 2 * torch.ones(2))
theta = prior.sample((300,))
x = theta + 0.3 * torch.randn_like(theta)
with contextlib.redirect_stdout(io.StringIO()):
    inference = NPE(prior, density_estimator="maf", show_progress_bars=False)
    estimator = inference.append_simulations(theta, x).train(max_num_epochs=8, training_batch_size=50)
finish(inference.summary["training_loss"], estimator)
