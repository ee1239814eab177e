"""PyKEEN: TransE on a small knowledge graph, negatives sampled.

library: pykeen
"""

import logging

import _torchvision  # noqa: F401
import numpy as np
import torch
from _digest import finish
from pykeen.models import TransE
from pykeen.training import SLCWATrainingLoop
from pykeen.triples import CoreTriplesFactory
from pykeen.utils import set_random_seed

logging.disable(logging.WARNING)
set_random_seed(0)
source = np.random.default_rng(0)
head, relation = source.integers(0, 60, 600), source.integers(0, 4, 600)
triples = torch.as_tensor(np.stack([head, relation, (head + relation + 1) % 60], axis=1))
factory = CoreTriplesFactory(triples.unique(dim=0), num_entities=60, num_relations=4)
model = TransE(triples_factory=factory, embedding_dim=16, random_seed=0)
loop = SLCWATrainingLoop(model=model, triples_factory=factory, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
losses = loop.train(triples_factory=factory, num_epochs=8, batch_size=64, use_tqdm=False)
finish(losses, model)
