"""TabNet: a classifier of synthetic tables with sparse masks.

library: pytorch-tabnet
"""

import numpy as np
from _digest import finish
from pytorch_tabnet.tab_model import TabNetClassifier

source = np.random.default_rng(0)
x = source.normal(size=(1024, 12)).astype(np.float32)
y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(int)
model = TabNetClassifier(n_d=8, n_a=8, seed=0, verbose=0, device_name="cpu")
model.fit(x[:768], y[:768], eval_set=[(x[768:], y[768:])], max_epochs=8, batch_size=128, virtual_batch_size=64)
finish(model.history["loss"], model.network)
