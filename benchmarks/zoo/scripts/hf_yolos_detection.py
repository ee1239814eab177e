"""Transformers: YOLOS detects boxes with Hungarian matching.

library: transformers
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from _hf import train
from transformers import YolosConfig, YolosForObjectDetection

torch.manual_seed(0)
model = YolosForObjectDetection(
    YolosConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=[48, 48],
        patch_size=8,
        num_detection_tokens=8,
        num_labels=3,
        use_mid_position_embeddings=False,
    )
)


def batch():
    boxes = torch.rand(4, 2, 4) * 0.3 + torch.tensor([0.3, 0.3, 0.2, 0.2])
    labels = torch.randint(0, 3, (4, 2))
    images = torch.randn(4, 3, 48, 48) * 0.1
    for image, places, kinds in zip(images, boxes, labels, strict=True):
        for (x, y, w, h), kind in zip((places * 48).tolist(), kinds.tolist(), strict=True):
            image[kind, int(y - h / 2) : int(y + h / 2), int(x - w / 2) : int(x + w / 2)] += 1
    targets = [{"class_labels": kinds, "boxes": places} for kinds, places in zip(labels, boxes, strict=True)]
    return {"pixel_values": images, "labels": targets}


finish(train(model, batch, steps=30), model)
