"""Canopy heights of mangroves, in mixed precision, four tiles at a time and two micro-batches to a step."""

import torch
from network import HeightNet
from tiles import masked_smooth_l1, tile_batch


class Trainer:
    def __init__(self, steps=60, micro_batches=2, term_weight=0.002):
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(1)
        self.net = HeightNet()
        self.steps, self.micro_batches, self.term_weight = steps, micro_batches, term_weight
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=100.0, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, steps, power=0.9)

    def loss_of(self, tiles):
        bands, height, seen = tiles
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = self.net(bands)
        return masked_smooth_l1(predicted.float(), height, seen)

    def fit(self):
        for step in range(self.steps):
            self.optimizer.zero_grad(set_to_none=True)
            shown = 0.0
            for _ in range(self.micro_batches):
                loss = self.loss_of(tile_batch(4, self.generator))
                # the later biomass term will have a weight of one, this one stays small beside it
                (self.term_weight * loss / self.micro_batches).backward()
                shown += loss.item() / self.micro_batches
            self.optimizer.step()
            self.scheduler.step()
            if step % 3 == 0:
                print(f"step {step:3d} loss {shown:.5f}")


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit()
