"""Five-line faults for the op audit, each with a healthy mirror: the same lines on other numbers or in FP32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: A step of a training: ``run(*make())`` in a module, in loss code, between backward pass and step end, or before.
Make = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Probe:
    """One fault.

    Attributes:
        codes: any of them names it rightly.
        text: what the line that is named holds.
        run: the lines; a result that requires a gradient gets one.
        bad, good: make the arguments of the fault and of its mirror, before the scan begins.
        stage: module, loss, optimizer or script.
    """

    codes: tuple[str, ...]
    text: str
    run: Callable[..., Any]
    bad: Make
    good: Make
    stage: str = "module"


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype = FP32) -> Tensor:
    """The same numbers every time."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale + mean).to(dtype)


def trained(*shape: int, **given: Any) -> Tensor:
    """A leaf that gets a gradient."""
    return normal(*shape, **given).requires_grad_()


# --- normalisation ----------------------------------------------------------------------------------------------------


def rms_norm(x):
    square = (x * x).mean(-1, keepdim=True)
    return x * torch.rsqrt(square + 1e-6)


def rms_norm_wide_eps(x):
    square = (x * x).mean(-1, keepdim=True)
    return x * torch.rsqrt(square.float() + 1e-12)


def moments(x):
    mean = x.mean(-1, keepdim=True)
    var = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / (var + 1e-5).sqrt()


def norm_swamped_by_eps(x, eps):
    centred = x - x.mean(-1, keepdim=True)
    var = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(var + eps)


def unit_length(x, eps):
    return x / (x.norm(dim=-1, keepdim=True) + eps)


def unit_length_clamped(x, eps):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)


def layer_norm(x, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def cosine(x, y, eps):
    return F.cosine_similarity(x, y, dim=-1, eps=eps)


def group_norm(x, eps):
    return F.group_norm(x, 4, eps=eps)


def normalised_features(x, dtype):
    return F.layer_norm(x.to(dtype), x.shape[-1:])


def centred_features(x, dtype):
    x = x.to(dtype)
    return x - x.mean(0)


# --- floors -----------------------------------------------------------------------------------------------------------


def parallel_scan(gates, values):
    decay = gates.cumprod(1)
    inverse = 1.0 / decay.clamp(min=1e-12)
    return decay * (values * inverse).cumsum(1)


def log_of_floor(p):
    return -torch.log(p + 1e-5)


def log_of_clamp(p):
    return -torch.log(p.clamp_min(1e-5))


def log_of_maximum(p):
    return -torch.log(torch.maximum(p, torch.full_like(p, 1e-5)))


def adam_by_hand(weight, moment, square, eps):
    weight.sub_(1e-3 * moment / (square.sqrt() + eps))


# --- closed units -----------------------------------------------------------------------------------------------------


def sigmoid_gate(x, weight):
    return torch.sigmoid(x @ weight) * x


def tanh_layer(x, weight):
    return torch.tanh(x @ weight)


def hard_tanh(x, weight):
    return F.hardtanh(x @ weight)


def relu6(x, weight):
    return F.relu6(x @ weight)


def gelu(x, weight):
    return F.gelu(x @ weight)


def hot_attention(q, k, v):
    scores = q @ k.mT
    return scores.softmax(-1) @ v


def clamped_cross_entropy(logits, y):
    p = torch.sigmoid(logits).clamp(1e-7, 1 - 1e-7)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


# --- sums -------------------------------------------------------------------------------------------------------------


def loop_total(terms):
    total = torch.zeros(8, dtype=terms.dtype)
    for term in terms:
        total = total + term
    return total


def loop_in_place(terms):
    total = torch.zeros(8, dtype=terms.dtype)
    for term in terms:
        total += term
    return total


def drift(position, velocity, dtype):
    state = position.to(dtype)
    for _ in range(64):
        away = state - state.new_tensor([40.0, 40.0])
        state = state + (velocity - away / 8).to(dtype) / 64
    return state.float() - position


def intervals_again(x):
    times = x.cumsum(0)
    return times[1:] - times[:-1]


def running_product(x, y):
    return x.cumprod(0).double() * 1e30 * y


def returns(rewards, discount):
    value, out = torch.zeros_like(rewards[0]), []
    for reward in rewards:
        value = reward + discount * value
        out.append(value)
    return torch.stack(out)


def embedded(weight, ids):
    return F.embedding(ids, weight)


def scattered(index, values):
    out = torch.zeros(4, dtype=values.dtype)
    return out.index_put_((index,), values, accumulate=True)


def gradient_buffer(buffer, gradient):
    buffer.add_(gradient)


def clip_in_half(gradients):
    total = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    for g in gradients:
        g.mul_((1.0 / (total + 1e-6)).clamp(max=1.0))


# --- states -----------------------------------------------------------------------------------------------------------


def average(mean, weight):
    mean.lerp_(weight, 1e-3)


def average_by_hand(mean, weight):
    mean.mul_(0.999).add_(weight, alpha=1e-3)


def average_moved_back(mean, weight):
    mean.mul_(0.995).add_(weight, alpha=0.005)


def refilled_master(weight, master, gradient):
    master.copy_(weight)
    master.add_(gradient, alpha=-1e-3)
    weight.copy_(master)


def rounded_then_refilled(weight, master, gradient):
    weight.copy_(master)
    master.copy_(weight)
    master.add_(gradient, alpha=-1e-3)


def stepped_in_fp32(weight, gradient, stochastic):
    wide = weight.float()
    wide.add_(gradient, alpha=-1e-3)
    if stochastic:
        wide.view(torch.int32).add_(torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)).bitwise_and_(-65536)
    weight.copy_(wide)


def rounded_with_noise(weight, gradient, noise):
    nearest = weight.float() - 1e-3 * gradient
    if noise:
        ulp = torch.exp2(nearest.abs().log2().floor() - 7)
        nearest = nearest + (torch.rand_like(nearest) - 0.5) * ulp
    weight.copy_(nearest)


def second_moment(square, gradient):
    square.mul_(0.999).addcmul_(gradient, gradient, value=1e-3)


def decay_weights(weight):
    weight.mul_(1 - 1e-4 * 0.1)


def counter(count):
    count.add_(1)


# --- differences ------------------------------------------------------------------------------------------------------


def log_ratio(a, b, dtype):
    return (a.to(dtype) - b.to(dtype)).mean()


def ages(times, now, dtype):
    return now.to(dtype) - times.to(dtype)


def distances_in_half(x):
    x = x.to(BF16)
    square = (x * x).sum(-1)
    return (square[:, None] + square[None] - 2 * x @ x.T).mean()


def bounded_ids(ids, table):
    return F.embedding(ids.long().clamp_max(len(table) - 1), table)


def one_minus_cosine(x, y):
    similarity = (x * y).sum(-1)
    return (1 - similarity).mean()


def focal(logits):
    p = torch.sigmoid(logits)
    return ((1 - p) ** 2 * -F.logsigmoid(logits)).mean()


def opacity(density):
    alpha = 1 - torch.exp(-density * 0.01)
    return alpha * 3.0


def exp_minus_one(x):
    return (torch.exp(x) - 1) * 5.0


def squared_distance(x, y):
    distance = (x * x).sum(-1) - 2 * (x * y).sum(-1) + (y * y).sum(-1)
    return torch.exp(-distance)


def kernel_of_places(x, y, z):
    distance = (x * x).sum(1)[:, None] - 2 * x @ y.t() + (y * y).sum(1)
    return torch.softmax(-distance.clamp(min=0) / 2, -1) @ z


def window_means(x):
    total = F.pad(x.cumsum(-1), (4, 0))
    return (total[..., 4:] - total[..., :-4]) / 4


def segment_means(x, dtype):
    total = F.pad(F.softplus(x).to(dtype).cumsum(1), (0, 0, 1, 0))
    ends = torch.arange(8, x.shape[1] + 1, 8)
    means = (total[:, ends] - total[:, ends - 8]).float() / 8
    return (means - means.mean(1, keepdim=True)).relu()


def round_windows(x, dtype):
    total = F.softplus(x).cumsum(1, dtype=dtype)
    means = (total.float() - total.float().roll(8, 1))[:, 8:] / 8
    return (means - means.mean(1, keepdim=True)).relu()


def box_sums(x):
    table = F.pad((x * 1.0).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
    return table[..., 3:, 3:] - table[..., :-3, 3:] - table[..., 3:, :-3] + table[..., :-3, :-3]


def kl_by_hand(a, b):
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def fraction_of_cell(x, cells):
    position = x * cells
    return position - position.floor()


# --- casts, indices, angles -------------------------------------------------------------------------------------------


def positions(n, dtype):
    return torch.arange(n, dtype=dtype) * 1.0


def cast_positions(n, dtype):
    return torch.arange(n).to(dtype) * 1.0


def ids_in_features(batch, table):
    return F.embedding(batch[:, 0].long(), table)


def ids_from_the_first(batch, table, first):
    return F.embedding((batch[:, 0] - first).long(), table)


def hashed_ids(batch, table):
    return F.embedding(batch[:, 0].long() % len(table), table)


def multiplied_ids(batch, table):
    return F.embedding((batch[:, 0].long() * 2654435761 ^ 977) % len(table), table)


def fourier_features(coordinates, dtype):
    angles = coordinates.to(dtype)[:, None] * (torch.pi * 2.0 ** torch.arange(7))
    return angles.sin()


def rotary(position, frequency):
    angle = position[:, None] * frequency
    return torch.cos(angle)


def flushed_cast(x, dtype):
    return x.to(dtype) * 1e6


def fp8_matmul(x, w):
    x8 = x.to(torch.float8_e4m3fn)
    return x8.float() @ w


def clamped_fp8(x, w):
    x8 = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return x8.float() @ w


def rated(rewards, scores):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
    return (advantages * scores).mean()


def half_gradients(gradients):
    return [g.to(FP16) for g in gradients]


def loss_in_half(x, weight):
    y = x @ weight
    return (y.square().mean() * 1e-7).float()


# --- integers ---------------------------------------------------------------------------------------------------------


def image_difference(a, b):
    return (a - b).float() / 255.0


def image_sum(a, b):
    return (a + b).float() / 510.0


def quantised_product(a, b):
    return (a * b).float()


def quantised_cast(x):
    return x.round().to(torch.int8).float()


def uint8_frames(x):
    return (x * 255).to(torch.uint8).float() / 255


def sharp_factor(x, y):
    return torch.exp(-x) * y


def probabilities_in_half(scores, v):
    p = torch.softmax(scores, -1)
    return (p.square() @ v).float()


def ones(n, dtype, value=1.0):
    return torch.full((n,), value, dtype=dtype)


def images(offset):
    a = torch.arange(256, dtype=torch.int16).repeat(4)
    return ((a % 100) + 100).to(torch.uint8), ((a % 77) + offset).to(torch.uint8)


PROBES = {
    "rms_overflow": Probe(
        ("PD107",),
        "x * x",
        rms_norm,
        lambda: (normal(8, 32, scale=600, dtype=FP16),),
        lambda: (normal(8, 32, dtype=FP16),),
    ),
    "rms_underflow": Probe(
        ("PD206",),
        "x * x",
        rms_norm_wide_eps,
        lambda: (normal(8, 32, scale=1e-4, dtype=FP16),),
        lambda: (normal(8, 32, dtype=FP16),),
    ),
    "moments_bf16": Probe(
        ("PD705",),
        "mean * mean",
        moments,
        lambda: (normal(8, 64, mean=30, dtype=BF16),),
        lambda: (normal(8, 64, dtype=BF16),),
    ),
    "moments_fp32": Probe(
        ("PD705",), "mean * mean", moments, lambda: (normal(8, 64, mean=5000),), lambda: (normal(8, 64, mean=5),)
    ),
    "eps_over_variance": Probe(
        ("PD207",),
        "var + eps",
        norm_swamped_by_eps,
        lambda: (trained(8, 32, scale=1e-5), 1e-5),
        lambda: (trained(8, 32), 1e-5),
    ),
    "eps_over_length": Probe(
        ("PD207",), "+ eps", unit_length, lambda: (trained(8, 32, scale=1e-6), 1e-3), lambda: (trained(8, 32), 1e-3)
    ),
    "clamp_over_length": Probe(
        ("PD207",),
        "clamp_min",
        unit_length_clamped,
        lambda: (trained(8, 32, scale=1e-6), 1e-3),
        lambda: (trained(8, 32), 1e-3),
    ),
    "layer_norm_eps": Probe(
        ("PD207",), "layer_norm", layer_norm, lambda: (trained(8, 32, scale=1e-4), 1e-5), lambda: (trained(8, 32), 1e-5)
    ),
    "cosine_eps": Probe(
        ("PD207",),
        "cosine",
        cosine,
        lambda: (trained(8, 32, scale=1e-11), normal(8, 32), 1e-8),
        lambda: (trained(8, 32), normal(8, 32), 1e-8),
    ),
    "group_norm_eps": Probe(
        ("PD207",),
        "group_norm",
        group_norm,
        lambda: (trained(4, 8, 16, scale=1e-4), 1e-5),
        lambda: (trained(4, 8, 16), 1e-5),
    ),
    "normalised_features": Probe(
        ("PD705",),
        "layer_norm",
        normalised_features,
        lambda: (normal(16, 32, mean=1000), BF16),
        lambda: (normal(16, 32, mean=1000), FP32),
    ),
    "centred_features": Probe(
        ("PD705",),
        "x - x.mean(0)",
        centred_features,
        lambda: (normal(16, 32, mean=1000), BF16),
        lambda: (normal(16, 32, mean=2), BF16),
    ),
    "clamped_products": Probe(
        ("PD207",),
        "clamp",
        parallel_scan,
        lambda: (torch.sigmoid(trained(4, 90, 8, scale=0.3)), normal(4, 90, 8)),
        lambda: (torch.sigmoid(trained(4, 20, 8, scale=0.3, mean=1.0)), normal(4, 20, 8)),
    ),
    "log_floor": Probe(
        ("PD207",),
        "p + 1e-5",
        log_of_floor,
        lambda: (torch.softmax(trained(8, 64, scale=20), -1),),
        lambda: (torch.softmax(trained(8, 64, scale=1), -1),),
        "loss",
    ),
    "log_clamp": Probe(
        ("PD207",),
        "clamp_min",
        log_of_clamp,
        lambda: (torch.softmax(trained(8, 64, scale=20), -1),),
        lambda: (torch.softmax(trained(8, 64, scale=1), -1),),
        "loss",
    ),
    "log_maximum": Probe(
        ("PD207",),
        "maximum",
        log_of_maximum,
        lambda: (torch.softmax(trained(8, 64, scale=20), -1),),
        lambda: (torch.softmax(trained(8, 64, scale=1), -1),),
        "loss",
    ),
    "adam_eps": Probe(
        ("PD207", "PD503"),
        "+ eps",
        adam_by_hand,
        lambda: (normal(64), normal(64, scale=1e-6), normal(64, scale=1e-6).square(), 1e-3),
        lambda: (normal(64), normal(64, scale=1e-6), normal(64, scale=1e-6).square(), 1e-9),
        "optimizer",
    ),
    "closed_sigmoid": Probe(
        ("PD208",),
        "sigmoid",
        sigmoid_gate,
        lambda: (normal(32, 16), trained(16, 16, scale=300)),
        lambda: (normal(32, 16), trained(16, 16, scale=0.3)),
    ),
    "gate_shut_at_first": Probe(
        ("PD208",),
        "sigmoid",
        lambda x, weight, bias: torch.sigmoid(x @ weight + bias) * x,
        lambda: (normal(32, 16), trained(16, 16, scale=0.1), -14.0),
        lambda: (normal(32, 16), trained(16, 16, scale=0.1), -4.0),
    ),
    "closed_tanh": Probe(
        ("PD208",),
        "tanh",
        tanh_layer,
        lambda: (normal(32, 16), trained(16, 16, scale=100)),
        lambda: (normal(32, 16), trained(16, 16, scale=0.3)),
    ),
    "closed_tanh_bf16": Probe(
        ("PD208",),
        "tanh",
        tanh_layer,
        lambda: (normal(32, 16, dtype=BF16), trained(16, 16, scale=20, dtype=BF16)),
        lambda: (normal(32, 16, dtype=BF16), trained(16, 16, scale=0.3, dtype=BF16)),
    ),
    "closed_hardtanh": Probe(
        ("PD208",),
        "hardtanh",
        hard_tanh,
        lambda: (normal(32, 16), trained(16, 16, scale=100)),
        lambda: (normal(32, 16), trained(16, 16, scale=0.1)),
    ),
    "closed_gelu": Probe(
        ("PD208",),
        "gelu",
        gelu,
        lambda: (normal(32, 16, mean=3), -trained(16, 16, scale=1, mean=3)),
        lambda: (normal(32, 16), trained(16, 16, scale=0.3)),
    ),
    "hot_attention": Probe(
        ("PD208",),
        "softmax",
        hot_attention,
        lambda: (trained(4, 16, 64, scale=8), trained(4, 17, 64, scale=8), normal(4, 17, 64)),
        lambda: (trained(4, 16, 64, scale=0.3), trained(4, 17, 64, scale=0.3), normal(4, 17, 64)),
    ),
    "clamped_bce": Probe(
        ("PD207", "PD208"),
        "clamp",
        clamped_cross_entropy,
        lambda: (trained(64, scale=200), (normal(64, 1)[:, 0] > 0).float()),
        lambda: (trained(64), (normal(64, 1)[:, 0] > 0).float()),
        "loss",
    ),
    "loop_total": Probe(
        ("PD701",),
        "total + term",
        loop_total,
        lambda: (normal(1000, 8, mean=1, dtype=BF16),),
        lambda: (normal(1000, 8, mean=1),),
    ),
    "loop_in_place": Probe(
        ("PD701",),
        "total += term",
        loop_in_place,
        lambda: (normal(1000, 8, mean=1, dtype=BF16),),
        lambda: (normal(1000, 8, mean=1),),
    ),
    "loop_in_loss": Probe(
        ("PD701",),
        "total + term",
        loop_total,
        lambda: (torch.ones(3000, 8, dtype=FP16),),
        lambda: (normal(50, 8, mean=1, dtype=FP16),),
        "loss",
    ),
    "cumsum_bf16": Probe(
        ("PD701", "PD705"), "times[1:]", intervals_again, lambda: (ones(2000, BF16),), lambda: (ones(2000, FP32),)
    ),
    "cumprod_fp16": Probe(
        ("PD206",),
        "cumprod",
        running_product,
        lambda: (ones(60, FP16, 0.5), normal(60, dtype=FP16)),
        lambda: (ones(8, FP16, 0.9), normal(8, dtype=FP16)),
    ),
    "returns_bf16": Probe(
        ("PD701",),
        "discount * value",
        returns,
        lambda: (ones(600, BF16)[:, None], 0.9999),
        lambda: (ones(600, FP32)[:, None], 0.9999),
        "script",
    ),
    "embedding_bf16": Probe(
        ("PD701",),
        "embedding",
        embedded,
        lambda: (trained(4, 8, dtype=BF16), torch.arange(2000) % 4),
        lambda: (trained(4, 8), torch.arange(2000) % 4),
    ),
    "index_put_bf16": Probe(
        ("PD701",),
        "index_put_",
        scattered,
        lambda: (torch.arange(4000) % 4, ones(4000, BF16)),
        lambda: (torch.arange(4000) % 4, ones(4000, FP32)),
    ),
    "gradient_buffer": Probe(
        ("PD509", "PD701"),
        "buffer.add_",
        gradient_buffer,
        lambda: (normal(64, mean=10, dtype=BF16), normal(64, scale=1e-3, dtype=BF16)),
        lambda: (normal(64, mean=10), normal(64, scale=1e-3)),
        "optimizer",
    ),
    "clip_in_half": Probe(
        ("PD107",),
        "square()",
        clip_in_half,
        lambda: ([normal(64, scale=500, dtype=FP16)],),
        lambda: ([normal(64, dtype=FP16)],),
        "optimizer",
    ),
    "average_bf16": Probe(
        ("PD509",),
        "lerp_",
        average,
        lambda: (normal(64, dtype=BF16), normal(64, dtype=BF16) * 1.01),
        lambda: (normal(64), normal(64) * 1.01),
        "optimizer",
    ),
    "average_by_hand": Probe(
        ("PD509",),
        "mul_(0.999)",
        average_by_hand,
        lambda: (normal(64, dtype=BF16), normal(64, dtype=BF16) * 1.01),
        lambda: (normal(64), normal(64) * 1.01),
        "optimizer",
    ),
    "average_moved_back": Probe(
        ("PD509",),
        "mul_(0.995)",
        average_moved_back,
        lambda: (normal(256, dtype=BF16), normal(256, dtype=BF16) * 1.05),
        lambda: (normal(256, dtype=BF16), normal(256, dtype=BF16) * 9),
        "optimizer",
    ),
    "refilled_master": Probe(
        ("PD509", "PD501"),
        "weight.copy_(master)",
        refilled_master,
        lambda: (normal(64, mean=4, dtype=BF16), normal(64), normal(64)),
        lambda: (normal(64, mean=4), normal(64), normal(64)),
        "optimizer",
    ),
    "stepped_in_fp32": Probe(
        ("PD509", "PD501"),
        "weight.copy_(wide)",
        stepped_in_fp32,
        lambda: (normal(64, mean=4, dtype=BF16), normal(64), False),
        lambda: (normal(64, mean=4, dtype=BF16), normal(64), True),
        "optimizer",
    ),
    "rounded_with_noise": Probe(
        ("PD509", "PD501"),
        "weight.copy_(nearest)",
        rounded_with_noise,
        lambda: (normal(64, mean=4, dtype=BF16), normal(64), False),
        lambda: (normal(64, mean=4, dtype=BF16), normal(64), True),
        "optimizer",
    ),
    "rounded_then_refilled": Probe(
        ("PD509", "PD501"),
        "master.copy_(weight)",
        rounded_then_refilled,
        lambda: (normal(64, mean=4, dtype=BF16), normal(64, mean=4, dtype=BF16).float() + 1e-3, normal(64)),
        lambda: (normal(64, mean=4, dtype=BF16), normal(64, mean=5), normal(64)),
        "optimizer",
    ),
    "second_moment_bf16": Probe(
        ("PD509", "PD505"),
        "mul_(0.999)",
        second_moment,
        lambda: (normal(64, dtype=BF16).square(), normal(64, scale=1e-2, dtype=BF16)),
        lambda: (normal(64).square(), normal(64, scale=1e-2)),
        "optimizer",
    ),
    "decay_bf16": Probe(
        ("PD509", "PD501"),
        "mul_(1 - ",
        decay_weights,
        lambda: (normal(64, dtype=BF16),),
        lambda: (normal(64),),
        "optimizer",
    ),
    "counter_bf16": Probe(
        ("PD509",),
        "count.add_",
        counter,
        lambda: (torch.tensor(256.0, dtype=BF16),),
        lambda: (torch.tensor(256.0),),
        "script",
    ),
    "counter_fp32": Probe(
        ("PD509",), "count.add_", counter, lambda: (torch.tensor(2.0**24),), lambda: (torch.tensor(2.0**20),), "script"
    ),
    "log_ratio_bf16": Probe(
        ("PD705",),
        "a.to(dtype) - b.to(dtype)",
        log_ratio,
        lambda: (normal(64, mean=-200, scale=20), normal(64, mean=-200, scale=20) + 0.1, BF16),
        lambda: (normal(64, mean=-200, scale=20), normal(64, mean=-200, scale=20) + 0.1, FP32),
        "loss",
    ),
    "epoch_seconds": Probe(
        ("PD705",),
        "now.to(dtype)",
        ages,
        lambda: (
            1.7e9 + 10 * torch.rand(64, dtype=torch.float64),
            torch.tensor([1.7e9 + 11], dtype=torch.float64),
            FP32,
        ),
        lambda: (10 * torch.rand(64, dtype=torch.float64), torch.tensor([11.0], dtype=torch.float64), FP32),
    ),
    "years_bf16": Probe(
        ("PD705",),
        "now.to(dtype)",
        ages,
        lambda: (2000 + 20 * torch.rand(64), torch.tensor([2020.0]), BF16),
        lambda: (2000 + 20 * torch.rand(64), torch.tensor([2020.0]), FP32),
    ),
    "one_minus_cosine": Probe(
        ("PD705",),
        "1 - similarity",
        one_minus_cosine,
        lambda: (
            F.normalize(trained(64, 32), dim=-1).to(BF16),
            F.normalize(normal(64, 32) + 0.02 * normal(64, 32, 1)[..., 0], dim=-1).to(BF16),
        ),
        lambda: (
            F.normalize(trained(64, 32), dim=-1).to(BF16),
            F.normalize(normal(64, 32) + normal(64, 32, 1)[..., 0], dim=-1).to(BF16),
        ),
        "loss",
    ),
    "focal_bf16": Probe(
        ("PD705",),
        "1 - p",
        focal,
        lambda: (trained(64, mean=8, scale=0.5, dtype=BF16),),
        lambda: (trained(64, scale=1, dtype=BF16),),
        "loss",
    ),
    "focal_fp32": Probe(
        ("PD705",), "1 - p", focal, lambda: (trained(64, mean=19, scale=0.5),), lambda: (trained(64, mean=3),), "loss"
    ),
    "opacity_fp16": Probe(
        ("PD705",),
        "1 - torch.exp",
        opacity,
        lambda: (trained(64, scale=0.01, mean=0.03, dtype=FP16),),
        lambda: (trained(64, mean=50, scale=5, dtype=FP16),),
    ),
    "exp_minus_one": Probe(
        ("PD705",),
        "exp(x) - 1",
        exp_minus_one,
        lambda: (trained(64, scale=1e-3, dtype=BF16),),
        lambda: (trained(64, dtype=BF16),),
    ),
    "expanded_distance": Probe(
        ("PD705",),
        "distance =",
        squared_distance,
        lambda: (trained(64, 8, mean=30, dtype=BF16), normal(64, 8, mean=30, dtype=BF16) + 0.25),
        lambda: (trained(64, 8), normal(64, 8) + 0.25),
    ),
    "expanded_places": Probe(
        ("PD705",),
        "distance =",
        kernel_of_places,
        lambda: (normal(64, 2, scale=3, mean=8e3), normal(64, 2, scale=3, mean=8e3) + 0.1, normal(64, 4)),
        lambda: (normal(64, 2, scale=3), normal(64, 2, scale=3) + 0.1, normal(64, 4)),
    ),
    "integrated_in_bf16": Probe(
        ("PD701",),
        "state + (velocity",
        drift,
        lambda: (normal(32, 2, mean=40), trained(32, 2), BF16),
        lambda: (normal(32, 2, mean=40), trained(32, 2), FP32),
    ),
    "padded_windows_bf16": Probe(
        ("PD705",),
        "total[..., 4:]",
        window_means,
        lambda: (normal(4, 600, mean=60, scale=4, dtype=BF16),),
        lambda: (normal(4, 600, mean=60, scale=4),),
    ),
    "segment_means_bf16": Probe(
        ("PD705",),
        "total[:, ends]",
        segment_means,
        lambda: (trained(2, 768, 4), BF16),
        lambda: (trained(2, 96, 4), BF16),
    ),
    "round_windows_fp16": Probe(
        ("PD705",),
        "total.float()",
        round_windows,
        lambda: (trained(2, 6000, 4), FP16),
        lambda: (trained(2, 768, 4), FP16),
    ),
    "box_sums_bf16": Probe(
        ("PD705",),
        "- table",
        box_sums,
        lambda: (F.softplus(trained(2, 2, 120, 120)).to(BF16),),
        lambda: (F.softplus(trained(2, 2, 120, 120)),),
    ),
    "kl_bf16": Probe(
        ("PD705",),
        "p - q",
        kl_by_hand,
        lambda: (
            trained(16, 512, dtype=BF16),
            normal(16, 512, dtype=BF16) + normal(16, 512, 1, scale=0.02, dtype=BF16)[..., 0],
        ),
        lambda: (trained(16, 512, dtype=BF16), normal(16, 512, 1, dtype=BF16)[..., 0]),
        "loss",
    ),
    "fraction_bf16": Probe(
        ("PD705", "PD706"),
        "position - position.floor()",
        fraction_of_cell,
        lambda: (torch.rand(256).to(BF16), 511),
        lambda: (torch.rand(256), 511),
    ),
    "positions_bf16": Probe(("PD706",), "arange", positions, lambda: (1024, BF16), lambda: (1024, FP32)),
    "positions_cast": Probe(("PD706",), "arange", cast_positions, lambda: (8192, FP16), lambda: (1024, FP16)),
    "ids_bf16": Probe(
        ("PD706",),
        "long()",
        ids_in_features,
        lambda: (torch.randint(0, 1000, (64, 3)).to(BF16), normal(1200, 4)),
        lambda: (torch.randint(0, 200, (64, 3)).to(BF16), normal(1200, 4)),
    ),
    "bounded_ids": Probe(
        ("PD706",),
        "long()",
        bounded_ids,
        lambda: (torch.randint(0, 5000, (256,)).to(FP16), normal(5000, 4)),
        lambda: (torch.randint(0, 2000, (256,)).to(FP16), normal(5000, 4)),
    ),
    "ids_from_the_first": Probe(
        ("PD706",),
        "long()",
        ids_from_the_first,
        lambda: (torch.randint(3000, 3400, (64, 3)).to(FP16), normal(408, 4), 3000),
        lambda: (torch.randint(1000, 1400, (64, 3)).to(FP16), normal(408, 4), 1000),
    ),
    "distances_in_half": Probe(
        ("PD705",),
        "square[None]",
        distances_in_half,
        lambda: (trained(64, 16, mean=50),),
        lambda: (trained(64, 16),),
        "loss",
    ),
    "hashed_ids_fp32": Probe(
        ("PD706",),
        "long()",
        hashed_ids,
        lambda: (torch.randint(300_000_000, 900_000_000, (64, 3)).to(FP32), normal(96, 4)),
        lambda: (torch.randint(0, 9_000_000, (64, 3)).to(FP32), normal(96, 4)),
    ),
    "multiplied_ids_fp32": Probe(
        ("PD706",),
        "long()",
        multiplied_ids,
        lambda: (torch.randint(3_400_000_000, 3_400_001_000, (64, 3)).to(FP32), normal(96, 4)),
        lambda: (torch.randint(0, 9_000_000, (64, 3)).to(FP32), normal(96, 4)),
    ),
    "rotary_bf16": Probe(
        ("PD703", "PD705"),
        "cos",
        rotary,
        lambda: (torch.arange(0, 2048, 16).to(BF16), torch.tensor([1.0, 0.3, 0.1], dtype=BF16)),
        lambda: (torch.arange(0, 2048, 16.0), torch.tensor([1.0, 0.3, 0.1])),
    ),
    "fourier_features_bf16": Probe(
        ("PD703", "PD706"),
        "angles.sin()",
        fourier_features,
        lambda: (torch.arange(0, 256.0) / 256 + 1 / 512, BF16),
        lambda: (torch.arange(0, 256.0) / 256 + 1 / 512, FP16),
    ),
    "flushed_cast": Probe(
        ("PD706",),
        "x.to(dtype)",
        flushed_cast,
        lambda: (normal(64, scale=1e-8), FP16),
        lambda: (normal(64, scale=1e-3), FP16),
    ),
    "clipped_fp8": Probe(
        ("PD706", "PD402", "PD401"),
        "float8",
        fp8_matmul,
        lambda: (normal(32, 16, scale=3000), normal(16, 8)),
        lambda: (normal(32, 16, scale=3), normal(16, 8)),
    ),
    "flushed_fp8": Probe(
        ("PD706", "PD402"),
        "float8",
        fp8_matmul,
        lambda: (normal(32, 16, scale=2e-4), normal(16, 8)),
        lambda: (normal(32, 16), normal(16, 8)),
    ),
    "clamped_fp8": Probe(
        ("PD706", "PD401"),
        "float8",
        clamped_fp8,
        lambda: (normal(32, 16, scale=3000), normal(16, 8)),
        lambda: (normal(32, 16, scale=3), normal(16, 8)),
    ),
    "clamped_fp8_of_data": Probe(
        ("PD706", "PD401"),
        "float8",
        clamped_fp8,
        lambda: (normal(32, 16, scale=3000), normal(16, 8)),
        lambda: (normal(32, 16, scale=3), normal(16, 8)),
        "script",
    ),
    "moments_of_data": Probe(
        ("PD705",), "mean * mean", moments, lambda: (normal(64, 32, mean=3e4),), lambda: (normal(64, 32),), "script"
    ),
    "norm_swamped_by_eps_of_data": Probe(
        ("PD207",),
        "var + eps",
        norm_swamped_by_eps,
        lambda: (normal(64, 32, scale=1e-4), 1e-5),
        lambda: (normal(64, 32), 1e-5),
        "script",
    ),
    "advantages": Probe(
        ("PD207",),
        "std() + 1e-3",
        rated,
        lambda: (normal(64, scale=1e-6), normal(64)),
        lambda: (normal(64), normal(64)),
        "script",
    ),
    "half_gradients": Probe(
        ("PD706", "PD201"),
        "g.to(FP16)",
        half_gradients,
        lambda: ([normal(64, scale=1e-9)],),
        lambda: ([normal(64)],),
        "optimizer",
    ),
    "loss_in_half": Probe(
        ("PD201",),
        "y.square()",
        loss_in_half,
        lambda: (normal(32, 16, dtype=FP16), trained(16, 16, dtype=FP16)),
        lambda: (normal(32, 16), trained(16, 16)),
        "loss",
    ),
    "image_difference": Probe(("PD706",), "a - b", image_difference, lambda: images(130), lambda: images(0)),
    "image_sum": Probe(("PD706",), "a + b", image_sum, lambda: images(130), lambda: tuple(x // 4 for x in images(0))),
    "int8_product": Probe(
        ("PD706",),
        "a * b",
        quantised_product,
        lambda: (torch.arange(-64, 64, dtype=torch.int8), torch.full((128,), 40, dtype=torch.int8)),
        lambda: (torch.arange(-64, 64, dtype=torch.int32), torch.full((128,), 40, dtype=torch.int32)),
    ),
    "int8_cast": Probe(
        ("PD706",), "int8", quantised_cast, lambda: (normal(64, scale=500),), lambda: (normal(64, scale=20),)
    ),
    "uint8_cast": Probe(("PD706",), "uint8", uint8_frames, lambda: (normal(256),), lambda: (torch.rand(256),)),
    "exp_fp16": Probe(
        ("PD206",),
        "exp(-x)",
        sharp_factor,
        lambda: (normal(64, mean=20, dtype=FP16), normal(64, scale=3e4, dtype=FP16)),
        lambda: (normal(64, dtype=FP16), normal(64, dtype=FP16)),
    ),
    "squared_probabilities": Probe(
        ("PD206",),
        "p.square()",
        probabilities_in_half,
        lambda: (normal(8, 8192, dtype=FP16), normal(8192, 4, dtype=FP16)),
        lambda: (normal(8, 64, dtype=FP16), normal(64, 4, dtype=FP16)),
    ),
}
