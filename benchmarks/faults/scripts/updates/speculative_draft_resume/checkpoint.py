"""Saves the drafter in the layout of a released model and loads it again."""

import copy

import torch


def save_pretrained(model, path):
    torch.save({k: v.to(torch.bfloat16) for k, v in copy.deepcopy(model).state_dict().items()}, path)


def from_pretrained(factory, path):
    state = torch.load(path)
    model = factory().to(next(iter(state.values())).dtype)
    model.load_state_dict(state)
    return model
