import torch
from model import Transformer
from torch.nn import functional as F


def batches(n, size=8, length=16, vocab=64):
    for _ in range(n):
        start, stride = torch.randint(vocab, (size, 1)), torch.randint(1, 4, (size, 1))
        yield (start + stride * torch.arange(length + 1)) % vocab


def main():
    torch.manual_seed(3)
    model = Transformer()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for step, tokens in enumerate(batches(24)):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = compiled(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
