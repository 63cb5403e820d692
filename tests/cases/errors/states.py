"""Wrong attention states and wrong merging."""

import jax.numpy as jnp

import jflex
from jflex import AttentionState, merge, merge_all

GOOD = AttentionState.empty((4, 2, 8))
ONE_STAT = AttentionState.empty((4, 2, 8), stats=("max",))
OUT, LSE = jnp.zeros((1, 6, 4, 8)), jnp.zeros((1, 4, 6))
ROWS = [
    ("no state", lambda: merge(GOOD, (OUT, LSE)), TypeError, r"`b` must be an `AttentionState`. Got tuple.*from_atten"),
    ("no array", lambda: merge(AttentionState(1.0, LSE), GOOD), TypeError, r"`a.out` must be an array. Got float"),
    ("integers", lambda: merge(AttentionState(OUT.astype(int), LSE), GOOD), TypeError,
     r"`a.out`.*int32\[1,6,4,8\].*Cast"),
    ("lse of 16 bits", lambda: merge(AttentionState(GOOD.out, GOOD.lse.astype(jnp.bfloat16)), GOOD), TypeError,
     r"`a.lse` must be floating-point \(float32, float64\). Got bfloat16\[4,2\]. Cast"),
    ("lse in the order of flex_attention", lambda: merge_all([AttentionState(OUT, LSE)]), ValueError,
     r"`states\[0\]` must have `out` \[..., Hq, Dv\].*float32\[1,4,6\].*from_attention"),
    ("shapes", lambda: merge(GOOD, AttentionState.empty((1, 2, 8))), ValueError,
     r"`a` and `b` must have equal shapes.*a.out: float32\[4,2,8\].*b.out: float32\[1,2,8\].*broadcast_to"),
    ("dtypes", lambda: merge_all([GOOD, AttentionState.empty((4, 2, 8), jnp.bfloat16)]), TypeError,
     r"`states\[0\]` and `states\[1\]` must have equal dtypes.*bfloat16\[4,2,8\].*Cast `out`"),
    ("kinds", lambda: merge_all([GOOD, AttentionState.empty((4, 2, 8), normalize="none")]), ValueError,
     r"`states\[0\]` and `states\[1\]` must be of one kind.*normalize='softmax' and normalize='none'"),
    ("sinks without a softmax",
     lambda: jflex.with_sinks(AttentionState.empty((4, 2, 8), normalize="none"), jnp.zeros(2)), ValueError,
     r"`sinks` enter the denominator of a softmax"),
    ("nothing to merge", lambda: merge_all([]), ValueError, r"`states` must hold at least one.*AttentionState.empty"),
    ("one state without an axis of states", lambda: merge_all(AttentionState.empty((2, 8))), ValueError,
     r"`states`, if a single state, must have a leading axis.*float32\[2,8\].*x\[None\]"),
    ("layout", lambda: AttentionState.from_attention(OUT, LSE, "BHTD"), ValueError, r"`layout` must be one of.*'BHTD'"),
    ("other layout", lambda: AttentionState.from_attention(OUT, LSE, "BNTH"), ValueError,
     r"`out` must be \[B, Hq, T, Dv\] in the layout 'BNTH'.*float32\[1,6,4,8\].*`layout` of that call"),
    ("packed rows", GOOD.to_attention, ValueError, r"`to_attention` needs.*Got out: float32\[4,2,8\]. Take the fields"),
    # --- statistics
    ("other statistics", lambda: merge(ONE_STAT, GOOD), ValueError,
     r"`a` and `b` must hold the same statistics.*Got \('max',\) and \(\)"),
    ("shape of a statistic", lambda: merge_all([AttentionState(GOOD.out, GOOD.lse, max=ONE_STAT.max[:, :1])]),
     ValueError,
     r"`states\[0\]\.max` must have the shape and dtype of `lse`. Got float32\[4,1\], lse: float32\[4,2\]"),
    ("kind of a statistic", lambda: merge(AttentionState(GOOD.out, GOOD.lse, entropy=3.0), GOOD), TypeError,
     r"`a.entropy` must be an array. Got float"),
    ("statistics without a softmax", lambda: merge_all([AttentionState(GOOD.out, GOOD.lse, "none", ONE_STAT.max)]),
     ValueError, r"`states\[0\]` must have no `max` or `entropy` without a softmax. Got max"),
    ("statistics without lse",
     lambda: AttentionState.from_attention(jnp.zeros((1, 4, 2, 8)), jflex.AttentionStats(max=ONE_STAT.max[None])),
     ValueError, r"`lse` must be an lse, or statistics with one.*`return_stats`"),
]  # fmt: skip
