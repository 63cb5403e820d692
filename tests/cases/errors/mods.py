"""Wrong mods."""

import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases.errors.calls import F32, array, block_mask, call, mask, score

HELD = np.arange(8)  # a numpy array for mods to misuse


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx >= kv_idx else -score


class Holder:
    def __init__(self, array):
        self.array = array

    def mod(self, score, b, h, q_idx, kv_idx):
        return score + self.array[q_idx].astype(F32)


# Name, how to provoke it, type, what the message holds.
ROWS = [
    # --- score_mod, mask_mod
    ("score_no_function", lambda: call(score_mod=3), TypeError,
     r"`score_mod` must be a function \(score, b, h.*Got int"),
    ("mask_no_function", lambda: call(mask_mod="causal"), TypeError,
     r"`mask_mod` must be a function \(b, h, q_idx.*Got str"),
    ("mask_as_score", lambda: call(score_mod=mask), TypeError,
     r"mask \(calls.py:\d+\) takes.*pass it as `mask_mod`"),
    ("score_as_mask", lambda: call(mask_mod=score), TypeError,
     r"score \(calls.py:\d+\) takes.*pass it as `score_mod`"),
    ("arity", lambda: call(score_mod=lambda s, q, k: s), TypeError,
     r"<lambda> \(mods.py:\d+\) takes \(s, q, k\)"),
    ("mask_not_made", lambda: call(mask_mod=jflex.masks.causal), TypeError,
     r"-> bool\. causal \(sequences.py:\d+\) makes one: call it, as `causal\(\.\.\.\)`\.$"),
    ("rope_as_score", lambda: call(score_mod=jflex.rope()), TypeError,
     r"Rope \(rope.py:\d+\) is a vector mod: pass it as `query_mod` and `key_mod`\.$"),
    ("array_as_score", lambda: call(score_mod=array(1, 4, 8, 8)), TypeError,
     r"Got an array\. To add a bias .* pass `jflex.scores.bias\(array\)`"),
    ("array_as_mask", lambda: call(mask_mod=HELD), TypeError,
     r"Got an array\. To mask by an array \[T, S\], pass `lambda b, h, q_idx, kv_idx: array\[q_idx, kv_idx\]`"),
    ("block_mask_as_score", lambda: call(score_mod=block_mask()), TypeError,
     r"Got BlockMask\. Pass it as `block_mask`"),
    ("bool_of_score", lambda: call(score_mod=lambda s, b, h, q, k: q >= k), TypeError,
     r"`score_mod` must return one floating-point number; .*returned bool\[\].*pass it as `mask_mod`"),
    ("float_of_mask", lambda: call(mask_mod=lambda b, h, q, k: q.astype(F32)), TypeError,
     r"`mask_mod` must return one boolean; .*returned float32\[\].*Compare.*score_mod"),
    ("array_of_score", lambda: call(score_mod=lambda s, b, h, q, k: s + array(3)), TypeError,
     r"returned float32\[3\]\. It is called on scalars"),
    ("nothing_of_mask", lambda: call(mask_mod=lambda b, h, q, k: None), TypeError,
     r"must return one boolean.*NoneType"),
    ("branch", lambda: call(score_mod=branches), ValueError,
     r"`score_mod` cannot branch in Python.*branches \(mods.py:\d+\).*jnp\.where"),
    ("numpy_index", lambda: call(score_mod=Holder(HELD).mod), ValueError,
     r"to numpy or Python: Holder.mod \(mods.py:\d+\) .*an attribute that is a numpy array.*jnp\.asarray"),
    ("numpy_function", lambda: call(score_mod=lambda s, b, h, q, k: np.tanh(s)), ValueError,
     r"traced, to numpy or Python.*to a function of numpy.*use `jnp` functions"),
    ("list_index", lambda: call(mask_mod=lambda b, h, q, k: [True, False][h]), ValueError,
     r"indexes a list, or an attribute"),
    # --- vector mods
    ("vector_size", lambda: call(query_mod=lambda x, b, h, i: x[:8]), ValueError,
     r"`query_mod` must return one vector.*float32\[16\]; .*\(mods\.py:.* returned float32\[8\]\. It is"),
    ("vector_dtype", lambda: call(key_mod=lambda x, b, h, i: x.astype(jnp.bfloat16)), TypeError,
     r"`key_mod` must return one vector.*returned bfloat16\[16\]\. Cast it with `\.astype\(float32\)`"),
    ("vector_kind", lambda: call(query_mod=3), TypeError,
     r"`query_mod` must be a function \(query\[D\], b, h, .*Got int"),
    ("vector_signature", lambda: call(output_mod=lambda out, b, h, i: out), TypeError,
     r"`output_mod` must be a function \(out\[Dv\], lse, b, h, q_idx\).*takes \(out, b, h, i\)"),
    ("output_without_lse", lambda: call(normalize="none", output_mod=lambda out, lse, b, h, i: out * lse), ValueError,
     r"`output_mod` uses the lse.*`normalize='none'` there is none: .* gets None"),
]  # fmt: skip
