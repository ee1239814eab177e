"""PyTorch Forecasting: a temporal fusion transformer with quantile loss under Lightning.

library: pytorch-forecasting
"""

import logging

import _torchvision  # noqa: F401
import lightning as L
import numpy as np
import pandas as pd
from _digest import finish
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
L.seed_everything(0, verbose=False)
source = np.random.default_rng(0)
rows = [
    {"series": str(s), "time": t, "value": np.sin(t / 3 + s) + s + 0.1 * source.normal(), "week": float(t % 7)}
    for s in range(6)
    for t in range(60)
]
data = TimeSeriesDataSet(
    pd.DataFrame(rows),
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=16,
    max_prediction_length=4,
    static_categoricals=["series"],
    time_varying_known_reals=["time", "week"],
    time_varying_unknown_reals=["value"],
)
model = TemporalFusionTransformer.from_dataset(
    data,
    learning_rate=0.01,
    hidden_size=8,
    attention_head_size=2,
    hidden_continuous_size=8,
    loss=QuantileLoss(),
    log_interval=-1,
)


class Losses(L.Callback):
    values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.values.append(outputs["loss"].item())


trainer = L.Trainer(
    max_steps=30,
    accelerator="cpu",
    gradient_clip_val=0.1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Losses()],
)
trainer.fit(model, data.to_dataloader(train=True, batch_size=16, num_workers=0))
finish(Losses.values, model)
