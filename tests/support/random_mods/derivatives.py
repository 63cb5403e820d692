"""Functions with derivative rules that are not their derivatives, so that a rule that is passed over is seen."""

HELPERS = {
    "bent": """\
@jax.custom_jvp
def bent(x):
    return jnp.tanh(x)
bent.defjvp(lambda primals, tangents: (bent(*primals), 0.4 * tangents[0]))
""",
    "pulled": """\
@jax.custom_vjp
def pulled(x, y):
    return 0.5 * x * y + jnp.sin(y)
pulled.defvjp(lambda x, y: (pulled(x, y), y), lambda y, ct: (0.3 * ct, -0.7 * ct * jnp.tanh(y)))
""",
    "stepped": """\
@jax.custom_vjp
def stepped(x, i):
    return jnp.where(i % 2 == 0, x, 0.5 * x)
stepped.defvjp(lambda x, i: (stepped(x, i), i % 3 == 0), lambda third, ct: (jnp.where(third, 2 * ct, 0.25 * ct), None))
""",
    "doubly": """\
@jax.custom_jvp
def inner_of_doubly(x):
    return jnp.sin(x)
inner_of_doubly.defjvp(lambda primals, tangents: (inner_of_doubly(*primals), 0.8 * tangents[0]))
@jax.custom_vjp
def doubly(x):
    return inner_of_doubly(x) * 1.5
doubly.defvjp(
    lambda x: (doubly(x), jax.vjp(lambda y: inner_of_doubly(y) + 0.2 * y, x)[1]), lambda pull, ct: pull(0.6 * ct)
)
""",
    "length": """\
@jax.custom_jvp
def length(v):
    return jnp.sqrt(0.5 + jnp.sum(v * v))
length.defjvp(lambda primals, tangents: (length(*primals), 0.3 * jnp.sum(jnp.cos(primals[0]) * tangents[0])))
""",
    "looked": """\
@jax.custom_vjp
def looked(x, i):
    return x[i]
looked.defvjp(lambda x, i: (x[i], (x, i)), lambda kept, ct: (jnp.zeros_like(kept[0]).at[kept[1]].add(0.7 * ct), None))
""",
    "halved": """\
@jax.custom_jvp
def halved(x, y):
    return jnp.maximum(x, y) + 0.5 * x
@halved.defjvp
def halved_jvp(primals, tangents):
    x, y = primals
    return halved(x, y), tangents[0] * jax.nn.sigmoid(y) - 0.5 * tangents[1]
""",
}
