"""A phone classifier in FP16 with FP32 masters and a constant loss scale."""

import torch
import torch.nn as nn
import torch.nn.functional as F

LOSS_SCALE = 8.0


class PhoneNet(nn.Module):
    def __init__(self, mels=20, width=24, phones=8):
        super().__init__()
        self.conv1 = nn.Conv1d(mels, width, 5, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, padding=2)
        self.conv3 = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Conv1d(width, phones, 1)
        with torch.no_grad():
            self.out.weight.mul_(0.02)

    def forward(self, spectrum):
        x = F.relu(self.conv1(spectrum))
        x = x + F.relu(self.conv2(x))
        x = x + F.relu(self.conv3(x))
        return self.out(x)


def utterances(n, prototypes, frames=30):
    phone = torch.randint(len(prototypes), (n, frames // 6)).repeat_interleave(6, 1)
    return prototypes[phone].transpose(1, 2) + 0.5 * torch.randn(n, prototypes.shape[1], frames), phone


def framewise(logits, phone, frames_in_epoch=8_000_000):
    """Summed over frames and divided by those of the whole epoch, so that ranks can be added up."""
    return F.cross_entropy(logits, phone, reduction="sum") / frames_in_epoch


def backward(loss, model, masters):
    (loss * LOSS_SCALE).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.to(master.dtype) / LOSS_SCALE
        p.grad = None


def main():
    torch.manual_seed(21010)
    prototypes = torch.randn(8, 20)
    model = PhoneNet().to(torch.float16)
    masters = [nn.Parameter(p.detach().to(torch.float32)) for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=2e-3, eps=1e-14)
    for step in range(40):
        spectrum, phone = utterances(10, prototypes)
        logits = model(spectrum.to(torch.float16)).to(torch.float32)
        backward(framewise(logits, phone), model, masters)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
        if step % 2 == 0:
            print(f"step {step} loss {F.cross_entropy(logits, phone).item():.4f}")


if __name__ == "__main__":
    main()
