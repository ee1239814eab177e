import torch
import torch.nn.functional as F


def direction(model, tokens, xi=1e-1, eps=1.0):
    """One power iteration: in which direction of the embedding the tags change most."""
    with torch.no_grad():
        clean = model(tokens)[0].softmax(-1)
    d = F.normalize(torch.randn(*tokens.shape, model.width), dim=-1) * xi
    d.requires_grad_()
    divergence = F.kl_div(model(tokens, d)[0].log_softmax(-1), clean, reduction="batchmean")
    divergence.backward()
    d = F.normalize(d.grad, dim=-1)
    model.zero_grad()  # what the iteration left in the weights
    return eps * d, clean
