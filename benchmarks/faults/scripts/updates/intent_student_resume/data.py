import torch

VOCAB, CLASSES, LENGTH = 160, 8, 10


def utterances(n, generator, domain=0):
    """Bags of words; in the second domain a third of the vocabulary means something else."""
    weight = torch.randn(VOCAB, CLASSES, generator=torch.Generator().manual_seed(50))
    if domain:
        other = torch.randn(VOCAB, CLASSES, generator=torch.Generator().manual_seed(51))
        weight = torch.where(torch.arange(VOCAB)[:, None] % 3 == 0, other, weight)
    ids = torch.randint(VOCAB, (n, LENGTH), generator=generator)
    return ids, weight[ids].sum(1).argmax(1)
