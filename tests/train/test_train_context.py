"""Training with the tokens of rows divided among devices: losses and gradients are those of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from flax_layers.context_parallel import ContextParallel
from flax_layers.models import LayerConfig
from flax_layers.train import Computation, InputError, Rows, make_mesh, parse_mesh
from flax_layers.train.__main__ import main
from flax_layers.train.parallel import check_length, check_strategy
from jflex import context_parallel
from tests.cases import train_cases
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.layer_flavours import FLAVOURS
from tests.support.rows import tiers
from tests.train.test_train_resume import write_text
from tests.train.test_train_runs import SMALL, losses_of

pytestmark = NEEDS_EIGHT_DEVICES
LENGTH = 64
CONFIG = dataclasses.replace(
    train_cases.CONFIG, max_positions=LENGTH, layers=(LayerConfig(window=24), LayerConfig(rotary_base=None))
)
# A mesh, the strategy, the order of the tokens, and more of the computation.
RUNS = {
    "zigzag gathered": ("context=2", "all_gather", "zigzag", {}),
    "natural ring of four": ("data=2,context=4", "ring", "natural", {}),
    "ulysses": ("data=2,context=2", "ulysses", "zigzag", {}),
    "all axes": ("fsdp=2,context=2,model=2", "ring", "zigzag", {"accumulate": 2, "loss_chunk": 16}),
    "recomputed": ("data=2,context=2,model=2", "all_gather", "zigzag", {"remat": "blocks"}),
}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    shape = (4, LENGTH)
    return Rows(rng.integers(0, train_cases.VOCABULARY, shape), np.sort(rng.integers(0, 4, shape), axis=1))


def steps(trainer):
    """Loss and norm of three steps, a held-out loss, and the gradients of all parameters up to a factor."""
    metrics = [trainer.step(batch(seed)) for seed in range(3)]
    moments = {path: np.asarray(x) for path, x in trainer.state.optimizer[1][0].mu.items()}
    return [[float(step.loss), float(step.gradient_norm)] for step in metrics], trainer.mean_loss([batch(9)]), moments


@functools.cache
def on_one_device():
    return steps(train_cases.trainer(config=CONFIG))


def trainer_of(name, dtype=jnp.float32):
    mesh, strategy, order, more = RUNS[name]
    how = Computation(context_strategy=strategy, context_order=order, **more)
    return train_cases.trainer(mesh, how, CONFIG, dtype)


@tiers(full={"name": "zigzag gathered"}, rest="long")
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients_are_those_of_one_device(name):
    (found, held_out, moments), (right, right_held_out, right_moments) = steps(trainer_of(name)), on_one_device()
    np.testing.assert_allclose(found, right, rtol=3e-5)
    np.testing.assert_allclose(held_out, right_held_out, rtol=3e-5)
    for path, moment in right_moments.items():
        np.testing.assert_allclose(moments[path], moment, rtol=1e-3, atol=1e-5 * np.abs(moment).max(), err_msg=path)


@pytest.mark.long
def test_the_order_is_zigzag_unless_another_is_named(monkeypatch):
    """Attention of every layer gets the order. If its tokens came in another one, the losses above would differ."""
    seen, attend = [], jflex.context_parallel_attention

    def recorded(*arrays, order, **options):
        seen.append(None if order is None else order.tolist())
        return attend(*arrays, order=order, **options)

    monkeypatch.setattr(jflex, "context_parallel_attention", recorded)
    for how, order in ((Computation(), [0, 3, 1, 2]), (Computation(context_order="natural"), None)):
        seen.clear()
        train_cases.trainer("context=2", how, CONFIG).compile(*batch().tokens.shape)
        assert len(seen) >= len(CONFIG.layers)
        assert all(found == order for found in seen)


@tiers(full={"name": "zigzag gathered"}, rest="long")
@pytest.mark.parametrize("name", ["zigzag gathered", "natural ring of four"])
def test_a_step_sends_keys_alone_and_no_token_of_the_stream(name):
    """The order is taken of tokens that every device has, once; only attention sends along the axis of tokens."""
    mesh, strategy, *_ = RUNS[name]
    text = trainer_of(name, jnp.bfloat16).compile(*batch().tokens.shape).as_text()
    rows, context = parse_mesh(mesh)["data"], parse_mesh(mesh)["context"]
    sent = re.findall(r"= \(?(\w+\[[\d,]*\])\S*(?:, \S+\))? (all-gather|all-to-all|collective-permute)", text)
    of_stream = rf"\[{4 // rows},{LENGTH}(?:,{CONFIG.width})?\]|\[{4 // rows},{LENGTH // context},{CONFIG.width}\]"
    assert not [shape for shape, _ in sent if re.search(of_stream, shape)], sent
    floats = {kind for shape, kind in sent if not shape.startswith(("s32", "pred", "s8"))}  # not document ids, tables
    assert floats == {"all-gather" if strategy == "all_gather" else "collective-permute"}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda mesh: check_length(mesh, 96, "zigzag"),
            r"fsdp=1,context=2,model=1 must divide .* 4 chunks of a multiple of 16\. Got 96 tokens.*multiple of 64",
        ),
        (lambda mesh: check_length(mesh, 40, "natural"), r"2 chunks of a multiple of 16\. Got 40"),
        (
            lambda mesh: check_strategy(mesh, dataclasses.replace(CONFIG, num_kv_heads=1), "ulysses"),
            r"`--context-strategy ulysses` .* 2 devices of `context`\. Got 1 key heads\. Take all_gather or ring",
        ),
        (lambda mesh: Computation(context_order="balanced"), r"`context_order` must be one of zigzag, natural\. Got"),
        (lambda mesh: Computation(context_strategy="tree"), r"`context_strategy` must be one of all_gather, ring, ul"),
    ],
)
def test_wrong_input(check, message):
    with pytest.raises(InputError, match=message):
        check(make_mesh(parse_mesh("context=2")))


@pytest.mark.long
def test_a_run_goes_on_with_another_mesh(tmp_path):
    """A checkpoint holds whole arrays, wherever their parts lay: the losses are those of one device."""
    write_text(tmp_path / "text.txt")
    options = [*SMALL, f"--data={tmp_path}/text.txt", "--length=64", "--batch=4"]
    main([*options, f"--output={tmp_path}/one"])
    more = [f"--output={tmp_path}/two", "--schedule-steps=6"]
    main([*options, *more, "--mesh=fsdp=2,context=2,model=2", "--context-strategy=ring", "--steps=2"])
    main([*options, *more, "--accumulate=2"])
    expected = losses_of(tmp_path / "one")
    np.testing.assert_allclose([*losses_of(tmp_path / "two").values()], [*expected.values()], rtol=1e-4)


@tiers(full={"flavour": "linen"}, rest="long")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_layer_divides_its_tokens(flavour):
    mesh = make_mesh(parse_mesh("data=2,context=4"))
    order = tuple(context_parallel.zigzag_order(4).tolist())
    context = ContextParallel(mesh, batch_axes=("data",), order=order)
    options = {"score_mod": FLAVOURS[flavour].alibi(), "rotary_base": 100.0, "mask_mod": jflex.masks.causal()}
    layer = FLAVOURS[flavour].make(32, **options)
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, 32)), jnp.float32)
    turned = context_parallel.reorder(inputs, np.array(order))
    found, stats = jax.jit(lambda x: layer(x, context=context, return_stats=("entropy",)))(turned)
    right, right_stats = jax.jit(lambda x: layer(x, return_stats=("entropy",)))(inputs)
    np.testing.assert_allclose(context_parallel.restore(found, np.array(order)), right, rtol=1e-4, atol=1e-5)
    entropy = context_parallel.restore(stats.entropy, np.array(order), 2)
    np.testing.assert_allclose(entropy, right_stats.entropy, rtol=1e-4, atol=1e-5)
