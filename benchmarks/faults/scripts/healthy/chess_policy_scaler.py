"""Move prediction on synthetic boards, float16 autocast with a loss scale that probes upwards often."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    seed: int = 5
    squares: int = 64
    moves: int = 24
    width: int = 96
    batch: int = 128
    steps: int = 200
    lr: float = 2e-3
    max_norm: float = 1.0


class PolicyNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.pieces = nn.Embedding(7, 4)
        self.body = nn.Sequential(
            nn.Linear(4 * cfg.squares, cfg.width),
            nn.LayerNorm(cfg.width),
            nn.ReLU(),
            nn.Linear(cfg.width, cfg.width),
            nn.ReLU(),
        )
        self.move = nn.Linear(cfg.width, cfg.moves)

    def forward(self, board):
        return self.move(self.body(self.pieces(board).flatten(1)))


class Boards:
    def __init__(self, cfg, generator):
        self.cfg, self.generator = cfg, generator
        self.value = torch.randn(7, cfg.squares, cfg.moves, generator=generator)

    def sample(self, n):
        board = torch.randint(7, (n, self.cfg.squares), generator=self.generator)
        score = self.value[board, torch.arange(self.cfg.squares)].sum(1)
        return board, score.argmax(1)


def train(cfg):
    torch.manual_seed(cfg.seed)
    boards = Boards(cfg, torch.Generator().manual_seed(cfg.seed))
    net = PolicyNet(cfg)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=15)
    for step in range(1, cfg.steps + 1):
        board, move = boards.sample(cfg.batch)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(board)
        loss = F.cross_entropy(logits.float(), move)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), cfg.max_norm)
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    return net


if __name__ == "__main__":
    net = train(Config())
