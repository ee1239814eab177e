"""curated-transformers (spaCy's): a BERT encoder under a token classifier.

library: curated-transformers
"""

import torch
import torch.nn.functional as F
from _digest import finish
from curated_transformers.models.bert import BertConfig, BertEncoder
from torch import nn

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = BertEncoder(
            BertConfig(
                vocab_size=64,
                hidden_width=48,
                embedding_width=48,
                intermediate_width=96,
                num_attention_heads=4,
                num_hidden_layers=2,
                max_position_embeddings=32,
                model_max_length=32,
            )
        )
        self.head = nn.Linear(48, 4)

    def forward(self, ids):
        return self.head(self.encoder(ids).last_hidden_layer_states)


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(50):
    ids = torch.randint(1, 64, (8, 16))
    ids[:4, 12:] = 0
    targets = ((ids + ids.roll(1, 1)) % 4).masked_fill(ids == 0, -100)
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
