"""The site's table of what each implementation supports, made from the plans that dispatch reads.

`python -m tests.support.support_table` prints it, `--write` puts it into the page. It needs JAX 0.11 or later:
before, `mosaic_gpu` refuses everything. No GPU is needed, for a plan is made from the name of a device.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jflex
from jflex._call.dispatch import get_backend, select, select_passes, select_tangent
from jflex._call.dropout import kept_mod
from jflex.mods.trace import trace_mask_mod, trace_score_mod, trace_vector_mod
from pallas_kernels.plan import Refusal, all_gradients
from pallas_kernels.spec import AttentionSpec, Blocks, Dropout, Paging
from tests.support.specs import spec_of

PAGE = pathlib.Path(__file__).parents[2] / "docs/pages/reference/support.md"
BEGIN, END = "<!-- support -->", "<!-- /support -->"
NEEDS = (0, 11)  # of JAX, for all columns
HOPPER = {"platform": "gpu", "device_kind": "NVIDIA H200"}
AMPERE = {"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB"}
CPU = {"platform": "cpu", "device_kind": "cpu"}
NAMES = ("mosaic_gpu", "triton", "xla", "reference")
YES, NO, SELECTED = "yes", "no", "selected"

B, HEADS, LENGTH = 4, 16, 4096


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _sorting(score, b, h, q_idx, kv_idx):
    return score + jnp.sort(jnp.stack([score, score * 0.5]))[0]


# Of what a mod captures: the mod, made from the arrays.
def _same_document(ids):
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def _slopes(slopes):
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).astype(score.dtype)


def _bias(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx].astype(score.dtype)


def _shared_bias(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx].astype(score.dtype)


def _distance(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + LENGTH]


def _gathered(table, ids):
    return lambda score, b, h, q_idx, kv_idx: score + table[ids[q_idx], ids[kv_idx]]


def _noise(words):
    place = lambda q_idx, kv_idx: jax.random.fold_in(jax.random.wrap_key_data(words), q_idx * LENGTH + kv_idx)
    return lambda score, b, h, q_idx, kv_idx: score + jax.random.normal(place(q_idx, kv_idx))


def _dropout(seed):
    kept = kept_mod(0.1, jax.random.key(seed), B, HEADS)
    assert kept is not None  # the rate is not 0
    return {"dropout": Dropout(0.1, trace_mask_mod(kept)[0])}


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
      text: The feature, as the page says it.
      fields: Of the spec, beside those of a call of bfloat16.
      gradients: Whether all gradients are requested, too.
    """

    text: str
    fields: Mapping[str, Any] = MappingProxyType({})
    gradients: bool = True


def _score(mod: Callable[..., Any]) -> dict[str, Any]:
    return {"score_mod": trace_score_mod(mod)[0]}


def _matrix(vector, b, h_kv, kv_idx):
    return vector @ jnp.ones((64, 64))


def _vector(mod: Callable[..., Any]) -> dict[str, Any]:
    return {"key_mod": trace_vector_mod(mod, "key", 64, jnp.float32)[0]}


def _mask(mod: Callable[..., Any], block: int) -> dict[str, Any]:
    return {"mask_mod": trace_mask_mod(mod)[0], "blocks": Blocks((block, block), 1, 1)}


def _captured(build: Callable[..., dict[str, Any]], *arrays: tuple[tuple[int, ...], str]) -> dict[str, Any]:
    """Fields of a spec whose mods capture arrays that are only shapes."""
    fields: dict[str, Any] = {}
    jax.eval_shape(lambda *x: fields.update(build(*x)), *(jax.ShapeDtypeStruct(*array) for array in arrays))
    return fields


def features() -> list[Feature]:
    """The rows of the table."""
    ids, slopes = ((LENGTH,), "int32"), ((HEADS,), "float32")
    bias, shared = ((B, HEADS, LENGTH, LENGTH), "bfloat16"), ((HEADS, LENGTH, LENGTH), "bfloat16")
    distances, table = ((HEADS, 2 * LENGTH), "float32"), ((64, 64), "float32")
    pages = {"paging": Paging(page_size=64, num_pages=1024), "T": 33, "B": 32}
    latent = {"Hq": 128, "Hkv": 1, "D": 576, "Dv": 512, "values_in_keys": True}
    return [
        Feature("bfloat16, float16", {"dtype": "float16"}),
        Feature("float32", {"dtype": "float32"}),
        Feature("CPU with `Config(interpret=True)`", {**CPU, "config": jflex.Config(interpret=True)}),
        Feature(
            "queries and keys of `float8_e4m3fn`, `float8_e5m2`, without gradients",
            {"dtype": "bfloat16", "qk_dtype": "float8_e4m3fn", **HOPPER},
            gradients=False,
        ),
        Feature("float64", {"dtype": "float64"}),
        Feature("grouped heads, `Dv != D`, lengths of any size", {"Hkv": 4, "Dv": 128, "T": 1001, "S": 777}),
        Feature("head sizes above 256", {"D": 320}),
        Feature("`BlockMask` with `block_size=128`", _mask(_causal, 128)),
        Feature("`block_size=64`", _mask(_causal, 64)),
        Feature("`block_size=32`", _mask(_causal, 32)),
        Feature(
            "packed sequences: `flex_attention_varlen`",
            {"B": 1, **_captured(lambda x: _mask(_same_document(x), 128), ids)},
        ),
        Feature("`kv_lengths`, many queries", {"kv_lengths": True}),
        Feature("decoding: 1 to 16 queries", {"kv_lengths": True, "T": 1, "Hkv": 4}, gradients=False),
        Feature("`paged_attention`, `cascade_attention`", pages, gradients=False),
        Feature("`paged_attention` of prompts", {**pages, "T": LENGTH}, gradients=False),
        Feature(
            "pages of `float8_e4m3fn` (Ada and later), `float8_e5m2`, `int8`",
            {**pages, "paging": Paging(page_size=64, num_pages=1024, dtype="float8_e4m3fn"), **HOPPER},
            gradients=False,
        ),
        Feature("`mla_attention`", {**pages, **latent}, gradients=False),
        Feature(
            "`mla_attention` over `float8_e4m3fn` (Ada and later)",
            {**pages, **latent, "paging": Paging(page_size=64, num_pages=1024, dtype="float8_e4m3fn"), **HOPPER},
            gradients=False,
        ),
        Feature("gradient of `slopes[h]`", _captured(lambda x: _score(_slopes(x)), slopes)),
        Feature("gradient of `bias[b, h, q_idx, kv_idx]`", _captured(lambda x: _score(_bias(x)), bias)),
        Feature("gradient of `bias[h, q_idx, kv_idx]`", _captured(lambda x: _score(_shared_bias(x)), shared)),
        Feature("gradient of `table[h, q_idx - kv_idx]`", _captured(lambda x: _score(_distance(x)), distances)),
        Feature(
            "gradient of `table[ids[q_idx], ids[kv_idx]]`", _captured(lambda *x: _score(_gathered(*x)), table, ids)
        ),
        Feature("`query_mod`, `key_mod`, `value_mod`, `output_mod`, `jflex.rope`", {}),  # outside of the kernels
        Feature("`return_stats` over pages", {**pages, "stats": ("max", "entropy")}, gradients=False),
        Feature("`dropout_rate` over pages", {**pages, **_captured(_dropout, ((), "uint32"))}, gradients=False),
        Feature("`key_mod`, `value_mod`, `jflex.rope` over pages", {**pages, **_vector(jflex.rope())}, gradients=False),
        Feature("a `key_mod` over pages that is a matrix", {**pages, **_vector(_matrix)}, gradients=False),
        Feature("`sinks`", {"sinks": True}),
        Feature("`dropout_rate`", _captured(_dropout, ((), "uint32"))),
        Feature('`normalize="none"` (sigmoid attention)', {"normalize": "none", **_score(jflex.scores.sigmoid(-8.0))}),
        Feature("`jax.random` in a mod", _captured(lambda x: _score(_noise(x)), ((2,), "uint32"))),
        Feature('`return_stats` of `"lse"` and `"max"`', {"stats": ("max",)}),
        Feature('`return_stats` with `"entropy"`', {"stats": ("max", "entropy")}),
        Feature("a mod that sorts", _score(_sorting)),
        Feature("`Config(deterministic=True)`", {"config": jflex.Config(deterministic=True)}),
        Feature(
            "gradient of `table[h, q_idx - kv_idx]` with `Config(deterministic=True)`",
            {**_captured(lambda x: _score(_distance(x)), distances), "config": jflex.Config(deterministic=True)},
        ),
        Feature(
            "`Config(batch_invariant=True)`, many queries",
            {"config": jflex.Config(batch_invariant=True)},
            gradients=False,
        ),
        Feature(
            "`Config(batch_invariant=True)`, decoding and pages",
            {**pages, "config": jflex.Config(batch_invariant=True)},
            gradients=False,
        ),
    ]


Table = dict[str, dict[str, str]]  # cells, by row and column


def table() -> Table:
    """Asks the plans of every implementation."""
    rows = {
        feature.text: {name: _cell(feature, name) for name in NAMES} | {SELECTED: _selected(feature)}
        for feature in features()
    }
    by_xla = lambda name: YES if get_backend(name).differentiable or name == "xla" else f"{YES}; by `xla`"
    any_order = {name: YES if get_backend(name).differentiable else NO for name in NAMES}
    plain = Feature("", {})
    tangent = select_tangent(None, _spec(plain), all_gradients(_spec(plain)))
    return rows | {
        "`jax.jvp` with `Config(forward_mode=True)`": {
            **{name: _tangent_cell(plain, name) for name in NAMES}, SELECTED: f"`{tangent.name}`",
        },
        "forward over reverse mode with `Config(forward_mode=True)`": {
            **{name: by_xla(name) for name in NAMES}, SELECTED: "`xla`",
        },
        "derivatives of any order and mode": any_order | {SELECTED: ""},
    }  # fmt: skip


def _spec(feature: Feature, name: str | None = None) -> AttentionSpec:
    """The call of a feature, on a device that an implementation is made for unless the feature names one."""
    device = AMPERE if name == "triton" else CPU if name in ("xla", "reference") else HOPPER
    return spec_of(**{"B": B, "T": LENGTH, "Hq": HEADS, "D": 64} | device | feature.fields)


def _cell(feature: Feature, name: str) -> str:
    spec = _spec(feature, name)
    requested = all_gradients(spec) if feature.gradients else None
    plan = get_backend(name).plan(spec, requested)
    if isinstance(plan, Refusal):
        return NO
    if name in ("xla", "reference") and isinstance(get_backend(name).plan(_spec(feature), requested), Refusal):
        return f"{YES}, on a CPU"
    if plan.gradients is not None:
        return f"{YES}; backward by `{plan.gradients.backend}`"
    return f"{YES}; this gradient by `triton`" if "by 'triton'" in plan.describe() else YES


def _tangent_cell(feature: Feature, name: str) -> str:
    if get_backend(name).differentiable:
        return YES
    spec = _spec(feature, name)
    chosen = select_tangent(name, spec, all_gradients(spec)).name
    return YES if chosen == name else f"{YES}; by `{chosen}`"


def _selected(feature: Feature) -> str:
    """What dispatch selects where none is named: on a Hopper GPU unless the feature names a device."""
    spec = _spec(feature)
    if not feature.gradients:
        return f"`{select(None, spec).name}`"
    passes = select_passes(None, spec, all_gradients(spec))
    return f"`{passes.forward}`" + (f", backward `{passes.backward}`" if passes.backward != passes.forward else "")


def markdown(rows: Table) -> str:
    """The block between the page's markers, a row for each feature."""
    head = ["", *(f"`{name}`" for name in NAMES), SELECTED]
    lines = [head, ["---"] * len(head), *([text, *cells.values()] for text, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(text: str) -> Table:
    """The rows of a block of the page."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    columns = [cell.strip("`") for cell in lines[0][1:]]
    return {line[0]: dict(zip(columns, line[1:], strict=True)) for line in lines[2:]}


def committed() -> str:
    """The block that the page holds.

    Raises:
      ValueError: It holds none.
    """
    return _split(PAGE.read_text())[1]


def _split(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(rf"(.*{BEGIN}\n)(.*?)(\n?{END}\n.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{PAGE} lacks the markers {BEGIN} and {END}.")
    return match[1], match[2], match[3]


def main() -> None:
    """Prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the page")
    write = parser.parse_args().write
    if jax.__version_info__ < NEEDS:
        raise SystemExit(f"The table needs JAX 0.11 or later, and this is {jax.__version__}.")
    text = markdown(table())
    if not write:
        print(text)
        return
    before, _, after = _split(PAGE.read_text())
    PAGE.write_text(before + text + "\n" + after.lstrip("\n"))


if __name__ == "__main__":
    main()
