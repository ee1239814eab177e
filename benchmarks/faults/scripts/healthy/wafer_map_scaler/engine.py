import torch
import torch.nn.functional as F


def train_one_epoch(model, batches, optimizer, scheduler, scaler, accumulate=2, max_norm=2.0):
    """Gradients are unscaled once per step, then clipped; the scheduler waits if the scaler has skipped."""
    losses = []
    optimizer.zero_grad(set_to_none=True)
    for i, (wafer, kind) in enumerate(batches):
        with torch.autocast("cpu", torch.float16):
            logits = model(wafer)
        loss = F.cross_entropy(logits.float(), kind)
        scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    return losses
