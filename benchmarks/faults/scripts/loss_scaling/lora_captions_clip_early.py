"""LoRA on a frozen decoder, trainer of my own: AMP, gradient clipping 0.5, SGD with momentum."""

import torch
import torch.nn.functional as F
from torch import nn

MAX_GRAD_NORM = 0.5


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))


class Captioner(nn.Module):
    def __init__(self, dim=48, vocab=20):
        super().__init__()
        self.image_proj = LoRALinear(nn.Linear(32, dim))
        self.fc1, self.fc2 = LoRALinear(nn.Linear(dim, 96)), LoRALinear(nn.Linear(96, dim))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, image):
        x = self.image_proj(image)
        return self.lm_head(x + self.fc2(F.gelu(self.fc1(x))))


def train_step(model, batch, optimizer, scaler):
    image, word = batch
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(image).float(), word)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_GRAD_NORM)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main():
    torch.manual_seed(68)
    model = Captioner()
    teacher = torch.randn(32, 20)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(240):
        image = torch.randn(32, 32)
        loss = train_step(model, (image, (image @ teacher).argmax(-1)), optimizer, scaler)
        if step % 12 == 11:
            print(f"step {step + 1} loss {loss:.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
