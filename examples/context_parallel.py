"""Context parallelism on eight simulated devices: a long sequence, in shards that do equal work."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts; not on GPUs

import jax
import jax.numpy as jnp

import jflex
from jflex import context_parallel, masks


def main(length: int = 2048):
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("context",))
    sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
    query = jax.random.normal(jax.random.key(0), (1, length, 4, 32))
    key, value = jax.random.normal(jax.random.key(1), (2, 1, length, 2, 32))
    slopes = jflex.scores.alibi_slopes(4)

    ids = masks.document_ids_from_lengths(jnp.array([length // 2, length // 8, 3 * length // 8]), length)
    block_mask = jflex.create_block_mask(masks.causal_document(ids), None, None, length, length, block_size=32)
    orders = {
        "natural": None, "zigzag": context_parallel.zigzag_order(devices),
        "balanced": context_parallel.balanced_order(block_mask, devices),
    }  # fmt: skip
    for name, order in orders.items():
        costs = context_parallel.device_costs(block_mask, devices, order)
        print(f"{name:8s} largest share of a device {costs.max() / costs.mean():.2f} of the mean")

    order = orders["balanced"]
    tokens = [jax.device_put(context_parallel.reorder(x, order), sharding) for x in (query, key, value)]

    @jax.jit
    def attend(query, key, value, slopes):
        mod = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)  # absolute positions
        mask = masks.causal_document(ids)
        return jflex.context_parallel_attention(
            query, key, value, mod, mask_mod=mask, mesh=mesh, order=order, strategy="ring"
        )

    out = context_parallel.restore(attend(*tokens, slopes), order)
    mod = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)
    error = jnp.abs(out - jflex.flex_attention(query, key, value, mod, block_mask)).max()
    print(f"{devices} devices, largest difference from one device {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
