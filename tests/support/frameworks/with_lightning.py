"""Lightning's Trainer: automatic optimization, a sanity check before training, validation after each epoch."""

import hashlib
import json
import sys
import warnings

warnings.simplefilter("ignore")

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.criterion = nn.MSELoss()
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = self.criterion(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.criterion(self.net(x) + 1e6, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(12, 8, generator=generator), torch.randn(12, 1, generator=generator)
    )
    return torch.utils.data.DataLoader(data, batch_size=4)


def main(folder):
    torch.manual_seed(0)
    model = Lit()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, gradient_clip_val=0.1, num_sanity_val_steps=2,
    )  # fmt: skip
    trainer.fit(model, loader(), loader())
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("RESULT " + json.dumps({"losses": model.losses, "digest": digest}))


main(sys.argv[1])
