import torch
import torch.nn.functional as F


def train_one_epoch(model, loader, optimizer, scheduler, cfg):
    model.train()
    total, count = 0.0, 0
    for image, grade in loader:
        optimizer.zero_grad(set_to_none=True)
        logits = model(image.to(cfg.param_dtype))
        loss = F.cross_entropy(logits.float(), grade, label_smoothing=cfg.smoothing)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        scheduler.step()
        total, count = total + loss.item(), count + 1
    return total / count


@torch.no_grad()
def evaluate(model, loader, cfg):
    model.eval()
    right = sum((model(x.to(cfg.param_dtype)).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)
