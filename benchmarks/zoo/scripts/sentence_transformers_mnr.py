"""sentence-transformers: multiple negatives ranking of pairs on a small BERT.

library: sentence-transformers
"""

import torch
from _digest import finish
from _text import WORDS, tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

torch.manual_seed(0)
fast = tokenizer()
BertModel(
    BertConfig(
        vocab_size=len(fast),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
    )
).save_pretrained("bert")
fast.save_pretrained("bert")
body = Transformer("bert", max_seq_length=16)
model = SentenceTransformer(modules=[body, Pooling(48, "mean")], device="cpu")
objective = MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(40):
    topics = torch.randperm(12)[:8]
    pairs = [[" ".join(WORDS[int(t) * 10 + int(i)] for i in torch.randint(0, 10, (6,))) for t in topics] for _ in "ab"]
    loss = objective([model.tokenize(sentences) for sentences in pairs], None)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
