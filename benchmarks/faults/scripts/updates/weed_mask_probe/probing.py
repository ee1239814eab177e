import torch


def ridge_probe(encoder, images, masks, strength=1.0):
    """How much of the mask a ridge regression reads from the features of an encoder."""
    encoder.eval()
    for p in encoder.parameters():
        p.requires_grad_(False)
    features = encoder(images).mean((2, 3)).double()
    target = masks.mean((1, 2)).double()
    features = torch.cat([features, torch.ones(len(features), 1)], 1)
    gram = features.T @ features + strength * torch.eye(features.shape[1])
    weights = torch.linalg.solve(gram, features.T @ target)
    residual = target - features @ weights
    encoder.train()
    return 1 - (residual.var() / target.var()).item()
