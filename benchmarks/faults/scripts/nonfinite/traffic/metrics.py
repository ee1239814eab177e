"""Masked errors: a reading of zero means that the loop detector was off."""

import torch


def masked_mae(preds, labels, null_val=0.0):
    mask = (labels != null_val).float()
    mask = mask / mask.mean()
    loss = torch.abs(preds - labels) * mask
    return torch.mean(torch.where(torch.isnan(loss), torch.zeros_like(loss), loss))


def masked_mape(preds, labels, null_val=0.0):
    mask = (labels != null_val).float()
    mask = mask / mask.mean()
    loss = torch.abs(preds - labels) / labels
    loss = loss * mask
    loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss)
    return torch.mean(loss)
