import torch.nn.functional as F


def focal(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    at = target * p + (1 - target) * (1 - p)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - at) ** gamma * ce).sum() / target.sum().clamp(min=1)


def detection_loss(scores, boxes, positive, distances):
    classified = focal(scores.squeeze(1), positive)
    off = F.smooth_l1_loss(boxes, distances, reduction="none").mean(1)
    return classified, (off * positive).sum() / positive.sum().clamp(min=1)
