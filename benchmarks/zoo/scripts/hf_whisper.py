"""Transformers: Whisper transcribes made-up spectrograms.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
model = WhisperForConditionalGeneration(
    WhisperConfig(
        vocab_size=128,
        num_mel_bins=20,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
)
voices = torch.randn(128, 20)


def batch():
    ids = tokens(rows=4, length=20)
    spectrum = voices[ids].transpose(1, 2).repeat_interleave(5, dim=2) + 0.1 * torch.randn(4, 20, 100)
    return {"input_features": spectrum, "labels": ids}


finish(train(model, batch, steps=30), model)
