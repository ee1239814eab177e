import io

import torch
from data import windows
from model import QueueForecaster


class Trainer:
    def __init__(self, data, seed, total, lr=4e-3):
        torch.manual_seed(seed)
        self.g = torch.Generator().manual_seed(seed + 1)
        self.data, self.total, self.done = data, total, 0
        self.model = QueueForecaster()
        norms = [p for n, p in self.model.named_parameters() if p.dim() < 2]
        weights = [p for n, p in self.model.named_parameters() if p.dim() >= 2]
        groups = [{"params": weights, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step):
        return min(1.0, (step + 1) / 15) * max(0.05, 1 - step / self.total)

    def run(self, steps):
        for _ in range(steps):
            past, future = windows(self.data, 64, self.g)
            loss = torch.nn.functional.huber_loss(self.model(past), future)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            if self.done % 8 == 0:
                print(f"step {self.done} loss {loss.item():.4f}")
            self.done += 1

    def save(self):
        file = io.BytesIO()
        parts = {k: getattr(self, k).state_dict() for k in ("model", "optimizer", "scheduler")}
        torch.save({**parts, "done": self.done, "random": self.g.get_state()}, file)
        return file.getvalue()

    def load(self, checkpoint):
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for k in ("model", "optimizer", "scheduler"):
            getattr(self, k).load_state_dict(state[k])
        self.done = state["done"]
        self.g.set_state(state["random"])
