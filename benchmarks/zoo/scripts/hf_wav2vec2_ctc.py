"""Transformers: a Wav2Vec2 Conformer learns tones from raw sound with CTC.

library: transformers
"""

import torch
from _digest import finish
from _hf import train
from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerForCTC, set_seed

set_seed(0)  # masks are drawn by NumPy
model = Wav2Vec2ConformerForCTC(
    Wav2Vec2ConformerConfig(
        vocab_size=12,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 8),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.05,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        pad_token_id=0,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conformer_conv_dropout=0.1,
    )
)


def batch():
    tones = torch.randint(1, 12, (4, 6))
    time = torch.arange(640) / 8000
    sound = torch.sin(2 * torch.pi * 200 * tones[:, :, None] * time).flatten(1) + 0.05 * torch.randn(4, 3840)
    return {"input_values": sound, "labels": tones}


finish(train(model, batch, steps=30), model)
