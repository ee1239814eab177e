"""Losses of the causal language models."""

from torch.nn import CrossEntropyLoss


class CLMCrossEntropyLoss:
    def __init__(self, reduction="mean"):
        self.loss_fun = CrossEntropyLoss(reduction=reduction)

    def __call__(self, logits, labels):
        shift_logits = logits[:, :-1].contiguous()
        shift_labels = labels[:, 1:].contiguous()
        return self.loss_fun(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
