"""Wrong options of the engine and of generation, requests, penalties, samplings and constraints."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jflex
from flax_layers.generate import generate
from flax_layers.models import Decoder
from flax_layers.sampling import Sampling, SamplingBatch, sample
from flax_layers.serving import Constraint, Engine, EngineOptions, Guides, QueueFull, Request, Streaming
from flax_layers.serving.device.penalties import Penalties
from tests.cases import constraint_cases
from tests.cases.engine_cases import LATENT, PROMPTS, Client, engine_of, model, submit
from tests.models.test_models import SMALL
from tests.support.golden_models import load

TYPES, VALUES = TypeError, ValueError
REGEX = Constraint.regex("a")
STREAMING = Streaming(sinks=3, window=9)


def request(prompt=(1,), engine: Engine | None = None, **options: Any):
    return lambda: Client(engine_of() if engine is None else engine, prompt, **options)


def options(kind: str = "small", **more: Any):
    return lambda: engine_of(model(kind), **more)


def streamed(**more: Any):
    return options("streaming", **{"streaming": STREAMING, "context": 4096} | more)


def sized(**more: Any):
    return lambda: EngineOptions(**more)


def penalties(**more: Any):
    return lambda: Penalties(**more)


def sampling(**more: Any):
    return lambda: Sampling(**more)


def generated(prompts=PROMPTS, kind: str = "small", **more: Any):
    return lambda: generate(model(kind), prompts, **more)


def invariant(promise: bool, **more: Any):
    """A model that promises to be batch invariant, or does not, and an engine of which the options do."""
    config = jflex.Config(batch_invariant=True) if promise else None
    decoder = lambda: Decoder(SMALL, implementation="xla", attention_config=config, rngs=nnx.Rngs(0))
    return lambda: engine_of(decoder(), **{"batch_invariant": True} | more)


def on_two_devices(heads: int, **more: Any) -> Engine:
    config = dataclasses.replace(SMALL, num_kv_heads=heads)
    decoder = Decoder(config, rngs=nnx.Rngs(0), attention_config=jflex.Config(batch_invariant=bool(more)))
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    nnx.update(decoder, jax.device_put(nnx.state(decoder), NamedSharding(mesh, PartitionSpec())))
    return engine_of(decoder, **more)


SAME = r"`batch_invariant` must be the same in the `EngineOptions` and in the `attention_config` of the model\. "
FULL = r"0 requests wait, and `max_waiting` is 3\. Ask for at most 7 samples"
ROWS = [
    # --- requests
    ("long prompt", request((1,) * 64), VALUES, r"`prompt` must be shorter than 64 tokens, the context length, .* Got"),
    ("long text", request((1,) * 60, max_tokens=5), VALUES,
     r"together must be at most 64 tokens, .* Got 60 and 5\..*lower .* to 4"),
    ("unknown token", request((1, 64)), VALUES, r"`prompt` must hold tokens from 0 to 63, .* It holds 1 to 64"),
    ("empty prompt", request(()), VALUES, r"`prompt` must hold at least one token"),
    ("no tokens", request(max_tokens=0), VALUES, r"`max_tokens` must be at least 1. Got 0"),
    ("biased token", request(penalties=Penalties(logit_bias=((64, 1.0),))), VALUES,
     r"`logit_bias` must be of tokens .* 63\. Got 64"),
    ("logprobs", request(logprobs=21), VALUES, r"`logprobs` must be from 0 to 20. Got 21"),
    ("stop tokens", request(stop_tokens=(7,) * 1025), VALUES, r"`stop_tokens` must be at most 1024 tokens. Got 1025"),
    ("half a token", lambda: Request((1, 2.5)), TYPES, r"`prompt\[1\]` must be an integer. Got float"),
    ("one of several", lambda: engine_of().submit_all([Request((1,)), Request((64,))], [print] * 2), VALUES,
     "`prompt` must hold tokens from 0 to 63"),
    ("samples", lambda: submit(engine_of(max_waiting=3), (1, 2), [{}] * 8), QueueFull, FULL),
    # --- penalties and samplings
    ("presence", penalties(presence_penalty=2.5), VALUES, "`presence_penalty` must be from -2 to 2. Got 2.5"),
    ("repetition", penalties(repetition_penalty=0.0), VALUES,
     "`repetition_penalty` must be from 1e-06 to 1e[+]06. Got 0.0"),
    ("bias", penalties(logit_bias=((3, 101.0),)), VALUES,
     "`logit_bias` must be from -100 to 100. Got 101.0 for token 3"),
    ("biases", penalties(logit_bias=((3, 1.0),) * 301), VALUES, "`logit_bias` must be of at most 300 tokens. Got 301"),
    ("cold", sampling(temperature=-0.1), VALUES, r"`temperature` must be finite and at least 0. Got -0.1. Use 0 for"),
    ("top_k", sampling(top_k=-1), VALUES, "`top_k` must be at least 0. Got -1. Use 0 to keep all tokens"),
    ("min_p", sampling(min_p=-0.1), VALUES, "`min_p` must be at least 0 and at most 1. Got -0.1. Use 0"),
    ("seed", sampling(seed=-1), VALUES, r"`seed` must be at least 0 and less than 2\*\*32. Got -1"),
    ("no seeds", lambda: sample(jnp.ones((1, 9)), SamplingBatch(temperature=jnp.ones(1)), jnp.arange(1)), VALUES,
     r"`seed` of a SamplingBatch .* must be an array. Got None"),
    # --- sizes
    ("no requests", options(max_requests=0), VALUES, "`max_requests` must be at least 1. Got 0"),
    ("page size", options(page_size=257), VALUES, "`page_size` must be from 1 to 256. Got 257"),
    ("step", options(max_step_tokens=3), VALUES, "`max_step_tokens` must be at least `max_requests`, .* Got 3 and 4"),
    ("context", options(context=513), VALUES, "`context` must be from 2 to the 512 positions .* Got 513"),
    ("drafts", sized(draft_tokens=32), VALUES, r"`draft_tokens` must be from 0 to 31\. Got 32\. Use 0 for no specu"),
    ("cascade", sized(cascade_bytes=0), VALUES, r"`cascade_bytes` must be at least 1. Got 0. Pass None"),
    ("window", streamed(streaming=Streaming(5, 12)), VALUES,
     r"`sinks` and `window` .* at most the 16 positions .* Got 5 and 12\. Lower"),
    ("pages of a window", streamed(num_pages=4), VALUES,
     r"`num_pages` must be at least 5: page 0, .* 3 sinks and a window of 9 .* Got 4"),
    ("longest stream", streamed(context=(1 << 24) + 1), VALUES,
     r"`context` must be from 2 to 16777216 with `streaming`, .* Got 16777217"),
    ("no stream", streamed(streaming=None), VALUES,
     r"`context` must be from 2 to the 16 positions .* Got 4096\. `streaming` allows more"),
    ("drafts of a stream", sized(draft_tokens=3, streaming=STREAMING), VALUES,
     r"`draft_tokens` must be 0 with `streaming`, .* Got 3\. Leave one of"),
    # --- batch invariance
    ("promise of the model", invariant(True, batch_invariant=False), VALUES, SAME + "Got False and True"),
    ("promise of the engine", invariant(False), VALUES, SAME + "Got True and False"),
    ("drafts", sized(batch_invariant=True, draft_tokens=2), VALUES,
     r"`draft_tokens` must be 0 with `batch_invariant`: .* Got 2\. Leave one of them out"),
    ("stream", sized(batch_invariant=True, streaming=STREAMING), VALUES,
     r"`streaming` must be None with `batch_invariant`: .* Leave one of them out"),
    ("devices", lambda: on_two_devices(2, batch_invariant=True), VALUES,
     r"`batch_invariant` must be False for a model on several .* Got 2 devices"),
    ("heads", lambda: on_two_devices(1), VALUES, r"must divide the KV heads\. Got 2 devices for 1 heads"),
    # --- caches of eight bits
    ("other dtype", options(cache_dtype="int4"), VALUES,
     r"`cache_dtype` must be one of int8, float8_e4m3fn, float8_e5m2, or None for .* Got 'int4'"),
    ("latent vectors", options("latent", cache_dtype="int8"), VALUES,
     r"`cache_dtype` must be None or float8_e4m3fn .* Got int8\. Take float8_e4m3fn"),
    ("tiles", lambda: engine_of(load("deepseek_v3"), cache_dtype="float8_e4m3fn"), VALUES,
     r"tiles of 128 columns, .* and 32 columns\. Leave it out"),
    ("float16", lambda: engine_of(Decoder(LATENT, dtype=jnp.float16, rngs=nnx.Rngs(0)), cache_dtype="float8_e4m3fn"),
     VALUES, r"computes in float16, .* Compute in bfloat16 or float32, or"),
    # --- generation
    ("no prompt", generated([]), VALUES, "`prompts` must hold at least one prompt. Got none. Pass lists of tokens"),
    *(
        (f"{name} in place of tokens", generated(prompts), TypeError,
         rf"`prompts`, in prompt 0, must be a list of integers. Got '{got}'. Encode texts with the tokenizer")
        for name, prompts, got in (("one prompt", [1, 2], "1"), ("text", ["ab"], "ab"), ("floats", [[1.7]], r"\[1.7\]"))
    ),
    ("one stop token", generated(stop_tokens=3), TypeError, "`stop_tokens` must be a list of integers. Got '3'"),
    ("half of max_tokens", generated(max_tokens=2.5), TypeError, "`max_tokens` must be an integer. Got float"),
    ("half a step", generated(chunk=2.5), TypeError, "`chunk` must be an integer. Got float"),
    ("an empty prompt", generated([[1], []]), VALUES,
     "`prompts` must have at least one token each. Prompt 1 is empty. Pass"),
    ("a long prompt", generated([[1] * 512]), VALUES,
     r"`prompts` must be shorter than the 512 positions .* Prompt 0 has 512 tokens. Truncate it to 511"),
    ("an unknown token", generated([[1, 64]]), VALUES,
     r"tokens from 0 to 63, .* Prompt 0 holds 1 to 64. Use the tokenizer of"),
    ("generates nothing", generated(max_tokens=0), VALUES, "`max_tokens` must be at least 1. Got 0. Pass the number"),
    ("samplings", generated(sampling=[Sampling()] * 2), VALUES, "`sampling` must be one .* Got 2 for 7 prompts"),
    ("cache", generated(cache="none"), VALUES, "`cache` must be one of dense, paged. Got 'none'"),
    ("dtype of a dense cache", generated(cache_dtype="int8"), VALUES,
     "`cache_dtype` must be None unless `cache` is paged. Got int8. Pass both"),
    ("chunk", generated(chunk=0), VALUES, "`chunk` must be at least 1. Got 0"),
    # --- constraints
    ("no guides", request(constraint=REGEX), VALUES,
     "`constraint` is not supported by this engine: it was made without `guides`"),
    ("other guides", lambda: Engine(model(), EngineOptions(), constraint_cases.guides("bpe")), VALUES,
     r"`guides` must be of the 64 tokens of the model. Got 300"),
    ("no token", lambda: Guides(constraint_cases.tokenizer("bpe"), 20).begin(Constraint.regex("[x-z]")), VALUES,
     "no token of the model may come next"),
    ("long constraint", lambda: Constraint.regex("a" * 131073), VALUES,
     r"`constraint` must have at most 131072 characters. Got 131073"),
    ("surrogate", lambda: Constraint.regex("a\ud800"), VALUES,
     r"`constraint` must be text of Unicode. Got 'a.ud800', with a surrogate"),
    ("list", lambda: Constraint.json_schema([]), VALUES, r"`schema` must be a JSON object, true or false. Got \[\]"),
    ("bytes", lambda: Constraint.json_schema({"enum": [b"a"]}), VALUES, r"`schema` must be JSON. Got .*not JSON ser"),
]  # fmt: skip
