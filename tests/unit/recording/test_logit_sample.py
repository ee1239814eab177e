"""A sample of logits says what the whole would: the largest of each head, its entropy, and nothing of masked keys."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from precdoctor.recording.slots import logit_sample
from precdoctor.recording.slots.logit_sample import of_attention, of_scores, sharpness


def numbers(sample):
    vector = sharpness(sample).tolist()
    heads = max(1, sample.heads)
    return vector[0], vector[1 : 1 + heads], vector[1 + heads :]


def scores(batch=2, heads=3, queries=8, keys=8):
    torch.manual_seed(0)
    return 3.0 * torch.randn(batch, heads, queries, keys)


def test_all_rows_of_a_small_softmax_are_looked_at():
    x = scores()
    entropy, largest, relative = numbers(of_scores(x, -1, 0))
    p = x.softmax(-1)
    exact = -(p * p.log()).sum(-1)
    assert entropy == pytest.approx(exact.mean().item(), rel=1e-5)
    assert largest == pytest.approx(x.amax((0, 2, 3)).tolist())
    assert relative == pytest.approx((exact.mean((0, 2)) / math.log(8)).tolist(), rel=1e-5)


@pytest.mark.parametrize("fill", [-math.inf, -1e9, -10_000.0, torch.finfo(torch.float32).min])
def test_masked_keys_take_no_part(fill):
    x = scores()
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    wide = of_scores(x.masked_fill(~mask, fill), -1, 0)
    assert (wide.values == -math.inf).sum() == 2 * 3 * (~mask).sum()
    assert torch.allclose(sharpness(wide), sharpness(of_scores(x.masked_fill(~mask, -math.inf), -1, 0)))
    uniform = of_scores(torch.zeros(8, 8).masked_fill(~mask, fill), -1, 0)
    assert numbers(uniform)[2][0] == pytest.approx(1.0)  # the row with a single key does not count


def test_heads_are_told_from_the_module_when_the_shape_does_not():
    x = scores()
    merged = x.flatten(0, 1)
    assert torch.allclose(sharpness(of_scores(merged, 2, 3)), sharpness(of_scores(x, -1, 0)))
    assert of_scores(merged, 2, 0).heads == of_scores(merged, 2, 4).heads == 0


@pytest.mark.parametrize("shape", [(), (1,), (5, 1), (0, 4)])
def test_a_softmax_of_one_key_or_none_is_nothing(shape):
    assert of_scores(torch.ones(shape), -1 if shape else 0, 0) is None


@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 5, 7), (2, 3, 4, 5, 7)])
def test_any_number_of_dimensions_will_do(shape):
    assert of_scores(torch.randn(shape), -1, 0).values.shape[-1] == 7
    assert of_scores(torch.randn(shape), 0, 0).values.shape[-1] == shape[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_fused_attention_is_computed_again(causal, heads_of_keys):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, heads_of_keys, 6, 16)
    full = (q @ k.repeat_interleave(4 // heads_of_keys, 1).mT) / 4.0
    if causal:
        full = full.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    sample = of_attention(q, k, None, causal=causal, scale=None)
    assert torch.allclose(sample.values, full) and sample.heads == 4


def test_masks_of_fused_attention_are_applied_on_the_rows_that_are_looked_at():
    torch.manual_seed(0)
    q, k = torch.randn(8, 4, 64, 16), torch.randn(8, 4, 64, 16)
    allowed = torch.rand(8, 1, 64, 64) < 0.5
    added = torch.zeros(8, 1, 64, 64).masked_fill(~allowed, -1e9)
    by_flag, by_sum = (of_attention(q, k, m, causal=False, scale=0.25) for m in (allowed, added))
    assert torch.equal(by_flag.values == -math.inf, by_sum.values == -math.inf)
    rows = by_flag.values.shape[0] * by_flag.values.shape[2]
    assert 0 < rows <= logit_sample.ROWS
    weights = F.scaled_dot_product_attention(q, k, torch.eye(64).expand(8, 4, 64, 64), attn_mask=allowed, scale=0.25)
    assert torch.allclose(by_flag.values.softmax(-1)[-1, :, -1], weights[-1, :, -1], atol=1e-5)  # the last ones


def test_a_sample_is_bounded():
    x = torch.zeros(1).expand(64, 16, 4096, 512)
    assert of_scores(x, -1, 0).values.numel() <= 1 << 19
    q = torch.zeros(1).expand(16, 16, 4096, 64)
    assert of_attention(q, q, None, causal=True, scale=None).values.numel() <= 1 << 19
