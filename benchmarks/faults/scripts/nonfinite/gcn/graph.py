"""A random citation graph, and its normalisation."""

import torch


def citation_graph(n, edges, seed):
    g = torch.Generator().manual_seed(seed)
    adjacency = torch.zeros(n, n)
    pairs = torch.randint(n - 3, (edges, 2), generator=g)
    adjacency[pairs[:, 0], pairs[:, 1]] = 1
    adjacency = ((adjacency + adjacency.T) > 0).float()
    adjacency.fill_diagonal_(0)
    return adjacency


def normalize(adjacency):
    """D^-1/2 A D^-1/2."""
    degree = adjacency.sum(1)
    scale = degree.pow(-0.5)
    return scale[:, None] * adjacency * scale[None, :]
