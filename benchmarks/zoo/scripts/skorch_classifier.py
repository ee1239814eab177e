"""skorch: a network in a scikit-learn pipeline with a schedule and clipping.

library: skorch
"""

import numpy as np
import torch
from _digest import finish
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch import nn

torch.manual_seed(0)
source = np.random.default_rng(0)
x = source.normal(3, 10, size=(800, 20)).astype(np.float32)
y = (x[:, :5].sum(1) > 15).astype(np.int64)


class Classifier(nn.Module):
    def __init__(self, units=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, units), nn.ReLU(), nn.Dropout(0.3), nn.Linear(units, 2), nn.Softmax(-1))

    def forward(self, x):
        return self.body(x)


net = NeuralNetClassifier(
    Classifier,
    max_epochs=6,
    lr=0.1,
    batch_size=32,
    iterator_train__shuffle=True,
    verbose=0,
    callbacks=[GradientNormClipping(1.0), LRScheduler("StepLR", step_size=3)],
)
Pipeline([("scale", StandardScaler()), ("net", net)]).fit(x, y)
finish(net.history[:, "train_loss"], net.module_)
