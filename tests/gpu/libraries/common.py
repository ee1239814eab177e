"""What the scripts beside this one share: the device, deterministic algorithms, and the digest that they print last."""

import hashlib
import os
import sys

import torch

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
#: What FP16 stands for where the CPU is in the device's place, on which it takes long.
HALF = torch.float16 if ON_GPU else torch.bfloat16

torch.use_deterministic_algorithms(True, warn_only=True)
torch.manual_seed(0)


def skip(why):
    """There is nothing to train here."""
    print(why)
    sys.exit(77)


def tell(*modules):
    """Print a digest of what was trained."""
    digest = hashlib.sha256()
    for module in modules:
        for x in module.state_dict().values():
            if isinstance(x, torch.Tensor):
                x = x.full_tensor() if hasattr(x, "full_tensor") else x
                digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
