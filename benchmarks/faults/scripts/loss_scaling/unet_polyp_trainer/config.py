from dataclasses import dataclass


@dataclass
class TrainConfig:
    seed: int = 31
    image_size: int = 24
    train_images: int = 160
    val_images: int = 48
    batch_size: int = 16
    epochs: int = 8
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    amp: bool = True
