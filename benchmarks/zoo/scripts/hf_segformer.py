"""Transformers: SegFormer segments squares.

library: transformers
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from _hf import train
from transformers import SegformerConfig, SegformerForSemanticSegmentation

torch.manual_seed(0)
model = SegformerForSemanticSegmentation(
    SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        num_labels=4,
    )
)


def batch():
    labels = torch.randint(0, 4, (4, 4, 4)).repeat_interleave(16, 1).repeat_interleave(16, 2)
    labels[:, :2] = 255
    images = torch.eye(4)[labels.clamp(max=3)].permute(0, 3, 1, 2)[:, :3] + 0.3 * torch.randn(4, 3, 64, 64)
    return {"pixel_values": images, "labels": labels}


finish(train(model, batch, steps=30), model)
