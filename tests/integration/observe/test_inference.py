"""``record --inference`` of scripts that generate, in child processes: the same bits, and the cache in the log."""

from __future__ import annotations

import json
import subprocess

import pytest

torch = pytest.importorskip("torch")

import precdoctor  # noqa: E402
from tests.support.processes import environment, record, script, warm  # noqa: E402

#: A hand-written cache of each kind: tuples that are passed on, an object that grows, buffers of a module, none at all.
GENERATE = """
import hashlib, json, sys
import torch
import torch.nn.functional as F
from torch import nn

KIND = sys.argv[1]


class Cache:
    def __init__(self, layers):
        self.key_cache, self.value_cache = [None] * layers, [None] * layers

    def __getattr__(self, name):
        raise SystemExit("somebody asked for " + name)

    __len__ = __iter__ = __bool__ = __eq__ = lambda self, *_: sys.exit("somebody looked at a cache")


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * width // heads) for _ in range(2))
        if KIND == "buffers":
            self.register_buffer("k_cache", torch.zeros(2, kv_heads, 24, width // heads))
            self.register_buffer("v_cache", torch.zeros(2, kv_heads, 24, width // heads))
            self.used = 0

    def forward(self, x, past, layer):
        b, t, width = x.shape
        q, k, v = (
            f(x).view(b, t, n, -1).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        first = True
        if KIND == "tuples" and past is not None:
            k, v, first = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2), False
        if KIND == "object":
            held = past.key_cache[layer], past.value_cache[layer]
            if held[0] is not None:
                k, v, first = torch.cat([held[0], k], 2), torch.cat([held[1], v], 2), False
            past.key_cache[layer], past.value_cache[layer] = k, v
        if KIND == "buffers":
            first = self.used == 0
            self.k_cache[:, :, self.used : self.used + t], self.v_cache[:, :, self.used : self.used + t] = k, v
            self.used += t
            k, v = self.k_cache[:, :, : self.used], self.v_cache[:, :, : self.used]
        y = F.scaled_dot_product_attention(
            q, *(x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v)), is_causal=first and t > 1
        )
        return self.o(y.transpose(1, 2).reshape(b, t, width)), (k, v)


class GPT(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Attention(width, 4, 2) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens, past_key_values=None):
        x, presents = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            past = past_key_values[i] if KIND == "tuples" and past_key_values is not None else past_key_values
            y, present = layer(x, past, i)
            x = x + y
            presents.append(present)
        return (self.head(x), presents) if KIND == "tuples" else self.head(x)


torch.manual_seed(0)
model = GPT().eval().to(torch.bfloat16 if "bf16" in sys.argv else torch.float32)
tokens = whole = torch.randint(50, (2, 8))
past = Cache(2) if KIND == "object" else None
mix = hashlib.sha256()
with (torch.inference_mode if "inference" in sys.argv else torch.no_grad)():
    for step in range(6):
        result = model(whole if KIND == "none" else tokens, past)
        logits, past = result if KIND == "tuples" else (result, past)
        tokens = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
        whole = torch.cat([whole, tokens], 1)
        mix.update(logits.float().numpy().tobytes())
print(json.dumps([mix.hexdigest(), whole.tolist(), torch.rand(1).item()]))
"""


def generated(folder, *arguments, flags=("--inference",), code=GENERATE):
    """The run, and what the script printed under the recorder and by itself."""
    path = script(folder, "generate.py", code)
    done = record(folder, *flags, "--strict", "--", *warm(path, *arguments), run=folder / "run")
    assert done.status == 0, done.err
    command = warm(path, *arguments)
    plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment())
    return precdoctor.open_run(done.run), json.loads(done.out), json.loads(plain.stdout)


def cached(run, kind="kv_key"):
    return run.tensors(filters=[("kind", "==", kind)])


#: Heads of the cache where it was found itself, those of the queries where attention was given copies.
KINDS = {"tuples": 2, "object": 2, "buffers": 2, "none": 4}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("tuples", ()), ("object", ("inference",)), ("buffers", ("bf16",)), ("none", ()), ("none", ("bf16", "inference"))],
)
def test_generation_gives_the_same_bits_and_its_cache_has_rows(tmp_path, kind, more):
    run, recorded, plain = generated(tmp_path, kind, *more)
    assert recorded == plain
    for which in ("kv_key", "kv_value"):
        rows = cached(run, which).sort_values(["step", "order"])
        assert rows["step"].tolist() == [step for step in range(6) for _ in range(2)]
        length = [24] * 6 if kind == "buffers" else [8 + step for step in range(6)]
        assert [list(shape) for shape in rows["shape"]] == [[2, KINDS[kind], t, 16] for t in length for _ in range(2)]
        assert (rows["dtype"] == ("bfloat16" if "bf16" in more else "float32")).all()
        owners = set(zip(rows["module"], rows["name"], strict=True))
        by_number = {("", "0"), ("", "1")}
        assert owners == (by_number if kind in ("tuples", "object") else {("layers.0", ""), ("layers.1", "")})
        with_groups = rows[rows["token_hist"].notna()]
        assert set(with_groups["step"]) == {0, 1, 2, 4}
        tokens = [8 + step for step in with_groups["step"]]
        found = [sum(counts) for counts in with_groups["token_hist"]]
        assert found == [2 * KINDS[kind] * t * 15 for t in tokens]  # zeros of what is not written yet count for nothing
    assert not precdoctor.diagnose(run.path).findings


def test_a_run_that_nobody_asked_about_has_no_such_rows(tmp_path):
    trains = GENERATE.replace(
        "print(json",
        "model.float()(whole).float().sum().backward()\ntorch.optim.SGD(model.parameters(), 0.1).step()\nprint(json",
    )
    run, recorded, plain = generated(tmp_path, "none", flags=(), code=trains)
    assert recorded == plain
    tensors = run.tensors()
    assert not set(tensors["kind"]) & {"kv_key", "kv_value"}
    assert tensors["token_hist"].isna().all() and tensors["channel_hist"].isna().all()


LLAMA = """
import hashlib, json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attn_implementation=sys.argv[1],
)
model = LlamaForCausalLM(config).eval().to(getattr(torch, sys.argv[2]))
options = {"cache_implementation": "static"} if "static" in sys.argv else {}
out = model.generate(
    torch.randint(64, (2, 8)), max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
    output_logits=True, **options,
)
mix = hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in out.logits))
print(json.dumps([mix.hexdigest(), out.sequences.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "dtype", "more"), [("sdpa", "float32", ()), ("eager", "bfloat16", ("static",))])
def test_the_cache_of_transformers_is_found_layer_by_layer(tmp_path, attention, dtype, more):
    pytest.importorskip("transformers")
    run, recorded, plain = generated(tmp_path, attention, dtype, *more, code=LLAMA)
    assert recorded == plain
    rows = cached(run)
    assert set(rows["module"]) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert len(rows) == 2 * 5 and set(rows["dtype"]) == {dtype}
    lengths = {list(shape)[2] for shape in rows["shape"]}
    assert lengths == ({12} if more else {8, 9, 10, 11, 12})
    assert not precdoctor.diagnose(run.path).findings


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_a_second_run_finds_the_op_of_a_call_that_went_wrong(tmp_path, mode):
    code = f"""
    import torch

    class Scores(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).log() if x.min() > 0 else super().forward(x)

    torch.manual_seed(0)
    model = Scores(8, 8).eval()

    @torch.{mode}()
    def generate(x):
        return model(x)

    for step in range(4):
        generate(torch.full((2, 8), 1.0 if step == 3 else -1.0))
    """
    script(tmp_path, "generate.py", code)
    done = record(tmp_path, "--inference", "--autopsy", "--", *warm("generate.py"), run=tmp_path / "run")
    (finding,) = precdoctor.diagnose(precdoctor.open_run(done.run)).findings
    assert (finding.code, finding.cause, finding.location.op) == ("PD101", "log-of-nonpositive", "aten.log.default")
