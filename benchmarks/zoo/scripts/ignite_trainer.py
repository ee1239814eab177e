"""Ignite: an engine with handlers, OneCycle by a parameter group scheduler.

library: pytorch-ignite
"""

import torch
import torch.nn.functional as F
from _digest import finish
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import TerminateOnNan
from ignite.metrics import Accuracy, Loss
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(392, 10))
targets = torch.randint(0, 10, (512,))
images = torch.randn(10, 1, 16, 16)[targets] + torch.randn(512, 1, 16, 16)
data = torch.utils.data.TensorDataset(images, targets)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=64)
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)})
losses = []
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(loader))
trainer.run(loader, max_epochs=4)
finish(losses, model)
