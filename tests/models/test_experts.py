"""Mixtures of experts: outputs against float64, gradients, selection; models of them that are served and trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder
from flax_layers.models.config import ExpertsConfig
from flax_layers.models.experts import MixtureOfExperts, selected
from flax_layers.train import Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh
from flax_layers.train.flops import multiplied_parameters, step_flops, visible_pairs
from flax_layers.train.trainer import parameter_shapes
from tests.cases.engine_cases import engine_of, foresee, outputs
from tests.support.golden_models import expected, load
from tests.support.rows import tiers

GROUPS = ExpertsConfig(number=12, width=6, per_token=3, groups=4, groups_per_token=2, scale=2.5)
EXPERTS = {
    "sigmoid": GROUPS,
    "softmax": dataclasses.replace(GROUPS, scoring="softmax", normalized=False, shared=0),
    "one group": ExpertsConfig(number=5, width=4, per_token=5, shared=2),
    "renormalized": ExpertsConfig(number=5, width=4, per_token=2, shared=0, scoring="softmax"),
    "clamped": ExpertsConfig(
        number=5, width=4, per_token=2, shared=0, scoring="softmax", use_bias=True, swiglu_limit=0.7, swiglu_alpha=2.0
    ),
}


@functools.cache
def mixture(name: str) -> MixtureOfExperts:
    init = nnx.initializers.normal(0.8)
    linear = functools.partial(nnx.Linear, bias_init=init)
    made = MixtureOfExperts(8, EXPERTS[name], "silu", linear, kernel_init=init, rngs=nnx.Rngs(0))
    if made.router.bias is not None:
        made.router.bias[...] = jnp.linspace(-1.0, 1.0, EXPERTS[name].number)
    if made.router.correction is not None:
        made.router.correction[...] = jnp.linspace(-0.3, 0.3, EXPERTS[name].number)
    return made


def plainly(made: MixtureOfExperts, token: np.ndarray) -> np.ndarray:
    """One token in float64, by the formulas of the papers: its experts alone, one after the other."""
    config, state = made.router.config, nnx.to_pure_dict(nnx.state(made))
    arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), state)

    def mlp(parts, index=()):
        project = lambda x, part: x @ part["kernel"][index] + (part["bias"][index] if config.use_bias else 0)
        gate, up = project(token, parts["gate"]), project(token, parts["up"])
        if config.swiglu_limit is None:
            return project(gate / (1 + np.exp(-gate)) * up, parts["down"])
        gate, up = np.minimum(gate, config.swiglu_limit), np.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return project(gate / (1 + np.exp(-config.swiglu_alpha * gate)) * (up + 1), parts["down"])

    logits = token @ arrays["router"]["kernel"] + (arrays["router"]["bias"] if config.use_bias else 0)
    is_sigmoid = config.scoring == "sigmoid"
    scores = 1 / (1 + np.exp(-logits)) if is_sigmoid else np.exp(logits) / np.exp(logits).sum()
    choice = scores + arrays["router"]["correction"] if is_sigmoid else scores
    size = config.number // config.groups
    of_groups = [sorted(choice[g * size : (g + 1) * size])[-2 if is_sigmoid else -1 :] for g in range(config.groups)]
    groups = np.argsort([sum(best) for best in of_groups])[-config.groups_per_token :]
    candidates = [e for e in range(config.number) if e // size in groups]
    chosen = sorted(candidates, key=lambda e: choice[e])[-config.per_token :]
    total = sum(scores[chosen]) if config.normalized else 1.0
    out = np.zeros_like(token)
    for e in chosen:
        out += config.scale * scores[e] / total * mlp(arrays["experts"], e)
    return out + (mlp(arrays["shared"]) if config.shared else 0)


def tokens_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(*shape, 8)).astype(np.float32)


@tiers(rest="full")
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_against_float64(name):
    tokens = tokens_of(2, 9)
    found = nnx.jit(lambda made, x: made(x))(mixture(name), tokens)
    right = np.stack([plainly(mixture(name), token.astype(np.float64)) for token in tokens.reshape(-1, 8)])
    np.testing.assert_allclose(np.asarray(found).reshape(-1, 8), right, rtol=0, atol=2e-6 * np.abs(right).max())


@pytest.mark.full
@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_gradients_of_experts(name):
    """Against those of the same formulas over gathered experts, without a loop and without remat."""
    form, state = nnx.split(mixture(name))
    tokens = jnp.asarray(tokens_of(7))

    def gathered(state, tokens):
        made = nnx.merge(form, state)
        weights, chosen = jax.lax.top_k(made.router(tokens), GROUPS.per_token)
        gate, up, down = (getattr(made.experts, part).kernel[...][chosen] for part in ("gate", "up", "down"))
        hidden = jax.nn.silu(jnp.einsum("nw,nkwh->nkh", tokens, gate)) * jnp.einsum("nw,nkwh->nkh", tokens, up)
        routed = jnp.einsum("nkh,nkhw,nk->nw", hidden, down, weights)
        return routed if made.shared is None else routed + made.shared(tokens)

    def gradients(compute):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(compute(*args))), argnums=(0, 1)))(state, tokens)

    found, right = gradients(lambda state, tokens: nnx.merge(form, state)(tokens)), gradients(gathered)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(np.abs(other).max(), 1e-3))


@pytest.mark.full
def test_a_token_of_nan_changes_no_other():
    """As in padding of a step, which holds whatever is in memory."""
    made, tokens = mixture("sigmoid"), tokens_of(6)
    broken = tokens.copy()
    broken[2] = np.nan
    one, other = (nnx.jit(lambda made, x: made(x))(made, x) for x in (tokens, broken))
    assert np.isnan(other[2]).all()
    others = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(one[others], other[others])


@pytest.mark.full
def test_parameters_of_scores_are_those_of_the_model_or_float32():
    for float32_router, dtype in ((True, jnp.float32), (False, jnp.bfloat16)):
        config = dataclasses.replace(EXPERTS["clamped"], float32_router=float32_router)
        options = {"kernel_init": nnx.initializers.normal(), "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        router = MixtureOfExperts(8, config, "silu", nnx.Linear, **options).router
        assert router.bias is not None
        assert router.kernel.dtype == router.bias.dtype == dtype
        assert router(jnp.ones((3, 8), jnp.bfloat16)).dtype == jnp.float32


def test_equal_scores_select_as_many():
    assert selected(jnp.zeros((3, 12)), GROUPS).sum(axis=-1).tolist() == [3, 3, 3]


WRONG_EXPERTS = [
    ({"scoring": "tanh"}, r"`scoring` must be sigmoid or softmax\. Got 'tanh'"),
    ({"width": 0}, r"`width` must be at least 1\. Got 0"),
    ({"groups": 5}, r"`groups` must divide the 12 experts into groups of at least 2\. Got 5"),
    ({"groups": 12, "groups_per_token": 6}, r"groups of at least 2\. Got 12"),
    ({"groups_per_token": 5}, r"`groups_per_token` must be from 1 to the 4 groups\. Got 5"),
    ({"per_token": 7}, r"`per_token` must be from 1 to the 6 experts of 2 groups\. Got 7"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_EXPERTS, ids=range(len(WRONG_EXPERTS)))
def test_wrong_experts(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPS, **change)


# --- models


@tiers(full={"name": "gpt_oss"}, rest="long")
@pytest.mark.parametrize(("name", "devices", "drafts"), [("deepseek_v3", 2, 5), ("gpt_oss", 1, 0)])
def test_served_tokens_are_those_of_transformers(name, devices, drafts, monkeypatch):
    """Pages are poisoned, and equal prompts share pages: layers without a window read them in a cascade.

    None runs for latent attention. Accepted drafts of trees move latent vectors.
    """
    known = expected(name)
    prompts, right = known["tokens"].tolist() * 2, known["greedy"][:, :16].tolist() * 2
    foresee(monkeypatch, {tuple(prompt): tokens for prompt, tokens in zip(prompts, known["greedy"], strict=False)})
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]) if devices == 2 else None
    decoder = load(name, mesh=mesh)
    engine = engine_of(decoder, max_step_tokens=20, context=None, cascade_bytes=1, draft_tokens=drafts)
    for _ in range(2):
        assert outputs(engine, prompts, max_tokens=16) == right
    stats = engine.stats()
    assert stats.hit_tokens > 0
    assert (stats.cascade_steps > 0) == (name == "gpt_oss")
    assert (stats.accepted_tokens > 8) == (drafts > 0)
    if decoder.config.latent is not None:
        assert engine._executor.token_bytes == 4 * (32 + 8)
        assert all(x.is_fully_replicated for x in jax.tree.leaves(engine._executor._state.cache))


def rows(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(rng.integers(0, 64, (4, 64)), np.sort(rng.integers(0, 3, (4, 64)), axis=1))


def trained(name: str, mesh: str) -> tuple[list[float], Trainer]:
    """Losses of four steps of two layers on equal rows."""
    config = load(name).config
    config = dataclasses.replace(config, max_positions=64, vocabulary=64, layers=config.layers[:2])
    devices = make_mesh(parse_mesh(mesh))
    model = create_model(lambda: Decoder(config, implementation="xla", rngs=nnx.Rngs(0)), devices)
    trainer = Trainer(model, Recipe(steps=20, learning_rate=1e-2, warmup=1), mesh=devices)
    return [float(trainer.step(rows(0)).loss) for _ in range(4)], trainer


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), [("deepseek_v3", "data=2,fsdp=2,model=2"), ("gpt_oss", "context=2")])
def test_training(name, mesh):
    losses, trainer = trained(name, "data=1")
    assert losses[-1] < losses[1] < losses[0] + 1e-6
    corrections = [x for path, x in trainer.state.parameters.items() if path.endswith("correction")]
    assert len(corrections) == (name == "deepseek_v3")
    assert not any(np.asarray(x).any() for x in corrections)  # nothing balances the experts
    np.testing.assert_allclose(trained(name, mesh)[0], losses, rtol=1e-4)


def test_flops_count_the_experts_of_a_token():
    config = load("gpt_oss").config
    attention, experts = 2 * 48 * 60 + 2 * 48 * 20, 48 * 4 + 2 * 3 * 48 * 24
    assert multiplied_parameters(parameter_shapes(config), config) == 2 * (attention + experts) + 48 * 128
    config = load("deepseek_v3").config
    multiplied = multiplied_parameters(parameter_shapes(config), config)
    attention = 48 * 24 + 24 * 80 + 48 * 40 + 32 * 88 + 40 * 48
    experts = 48 * 8 + 3 * 48 * 16 * (3 + 1)  # the router, three routed experts and a shared one
    assert multiplied == 3 * attention + 3 * 48 * 80 + 2 * experts + 48 * 256
    documents = np.zeros((1, 6), int)
    pairs = 3 * visible_pairs(documents)
    assert step_flops(config, multiplied, documents) == 6 * multiplied * 6 + 6 * 4 * (20 + 10) * pairs
