import torch
import torch.nn.functional as F


def dice_loss(logits, target):
    p = logits.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def train_step(model, batch, optimizer, scaler, max_norm):
    image, mask = batch
    with torch.autocast("cpu", torch.float16):
        logits = model(image)
    logits = logits.float()
    loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
