"""What equations of jaxprs hold, by the version of JAX that traced them."""

from __future__ import annotations

import jax
import numpy.typing as npt
from jax.extend import core

from pallas_kernels.program.rules.views import NotOnTile
from pallas_kernels.types import Params, aval_of


def open_jaxpr(x: core.ClosedJaxpr | core.Jaxpr) -> tuple[core.Jaxpr, tuple[npt.ArrayLike, ...]]:
    """Opens a ``ClosedJaxpr`` (JAX <= 0.10) or a ``Jaxpr`` with constants (JAX >= 0.11)."""
    return getattr(x, "jaxpr", x), tuple(getattr(x, "consts", ()))  # pyright: ignore[reportReturnType]  (by version)


def body_of(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, tuple[npt.ArrayLike, ...]]:
    """The jaxpr that a call inlines, and its constants."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return open_jaxpr(eqn.params[key])
    if "_prim" in eqn.params:  # JAX >= 0.12: `jnp.ldexp`
        called = eqn.params["_prim"]
        expand = lambda *xs: jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, xs)))
        return open_jaxpr(jax.make_jaxpr(expand)(*(aval_of(v) for v in eqn.invars)))
    raise NotOnTile(f"primitive `{eqn.primitive.name}` has no meaning on a tile")


def scan_layout(params: Params) -> tuple[int, int]:
    """How many inputs of a `scan` are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = (len(group) for group in params["ft_in"].unpack())  # JAX >= 0.11
    return consts, carry
