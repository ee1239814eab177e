"""Lightning: 16-bit mixed precision, accumulation, clipping, a loader with workers and pinned memory, validation."""

import lightning
import torch
from common import ON_GPU, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 4))

    def training_step(self, batch, _index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _index):
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


lightning.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(256, 32), torch.randint(4, (256,)))
model = Classifier()
trainer = lightning.Trainer(
    accelerator="gpu" if ON_GPU else "cpu", devices=1, precision="16-mixed" if ON_GPU else "bf16-mixed", max_epochs=3,
    gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(data, 32, num_workers=2, pin_memory=ON_GPU), DataLoader(data, 128))
tell(model)
