import torch


class Trainer:
    """Runs epochs, keeps the mean losses, writes nothing unless asked."""

    def __init__(self, model, optimizer, scheduler, loader, max_norm=1.0):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loader, self.max_norm = loader, max_norm
        self.history = []

    def train_batch(self, x):
        loss = self.model.strangeness(x).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            losses = [self.train_batch(x) for (x,) in self.loader]
            self.history.append(sum(losses) / len(losses))
            print(f"epoch {epoch:2d} loss {self.history[-1]:.4f}")

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "history": self.history}
