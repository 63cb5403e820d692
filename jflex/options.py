"""Keywords that the calls of attention share: what they mean, their defaults, and the checks that need no arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, get_type_hints

import jax
from jaxtyping import Float, Int32

from jflex._call.dispatch import Implementation, Requested, hashable
from jflex._call.dropout import KeptMod, check_dropout, kept_mod
from jflex._call.vector_mods import VectorMods
from jflex._check.arguments import check_lse, check_normalize
from jflex.config import Config
from jflex.mods.signature import answers_keywords
from jflex.mods.types import MaskMod, OutputMod, ScoreMod, VectorMod
from jflex.states.stats import Stat, check_stats, select_stats
from jflex.types import AnyArray

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LatentOptions(TypedDict, total=False):
    """Keywords of all calls, those of latent attention too."""

    mask_mod: MaskMod | None
    """``(b, h, q_idx, kv_idx) -> bool``, on scalars; keys where it is False do not enter the softmax."""

    sinks: Float[AnyArray, " _Hq"] | None
    """A natural logit for each query head, which enters the denominator of its softmax and has no value: learned ones
    get gradients. See `with_sinks`; the lse includes them, so states that are to be merged must have none."""

    scale: float | None
    """Multiplies the raw scores; ``D ** -0.5`` for None."""

    implementation: Implementation
    """``"mosaic_gpu"``, ``"triton"``, ``"official_triton"``, ``"xla"`` or ``"reference"``, or a sequence of names: the
    first that supports the call runs. It never falls back to a backend that is not named, with one exception:
    ``"mosaic_gpu"`` has ``"triton"`` compute gradients that its own kernels cannot. None selects, for each pass, the
    first of ``jflex.ORDER`` that supports the call and is not known to be slower than a later one; it warns on a GPU if
    that is ``"xla"``."""

    config: Config | None
    """Tile sizes, None for the tuned ones; ``decode`` tiles are for requests with few queries. ``deterministic=True``
    fixes the summation order; without it, the gradient of the query may differ in its last bits between runs of
    ``"mosaic_gpu"``."""


class Options(LatentOptions, total=False):
    """Keywords that the calls of attention share.

    A vector mod sees one vector, in float32 (float64 of a float64 array), and int32 scalars. It must return the same
    size and dtype, which is then rounded once to the dtype of the array.
    """

    query_mod: VectorMod | None
    """``(query[D], b, h, q_idx) -> [D]``, on each query before its products with keys: a rotation, say (`jflex.rope`).
    In dense calls, vector mods are not fused into the kernel: the modified arrays are stored."""

    key_mod: VectorMod | None
    """``(key[D], b, h_kv, kv_idx) -> [D]``, on each key; ``h_kv`` is the key head. Keys and values of batch size 1 stay
    shared, unless a mod uses ``b``: then each batch entry gets its own."""

    value_mod: VectorMod | None
    """``(value[Dv], b, h_kv, kv_idx) -> [Dv]``, on each value."""

    output_mod: OutputMod | None
    """``(out[Dv], lse, b, h, q_idx) -> [Dv]``, on each output before it is returned. ``lse`` is that of the query; with
    ``normalize="none"`` it is None. A query that attends to no key comes as zeros and an lse of ``-inf``. The lse that
    is returned is the unmodified one."""

    normalize: Literal["softmax", "none"]
    """``"none"`` takes what `score_mod` returns as the weights themselves, 0 where masked: sigmoid attention with
    `jflex.scores.sigmoid`, say. There is no lse then, and there are no sinks."""

    dropout_rate: float
    """Probability that a weight is dropped after the softmax; the others are multiplied by ``1 / (1 - dropout_rate)``.
    A Python number, at least 0 and less than 1, part of the program. The lse is that without dropout."""

    dropout_key: AnyArray | None
    """A random key, for a rate above 0; a new one recompiles nothing. What it drops depends on it and on ``b, h, q_idx,
    kv_idx`` alone, not on tiles, implementation or sharding. Keys [B, Hq] are for a batch entry and a head each; of an
    axis of size 1, all drop the same weights. Not used at a rate of 0."""


# Overloads of the calls: keywords of one that returns the output alone, and of one that may return a pair.


class Output(Options, total=False):
    """Keywords of a call that returns the output."""

    return_lse: Literal[False]
    return_stats: tuple[()]


class Pair(Options, total=False):
    """Keywords of a call that may return the lse or statistics too."""

    return_lse: bool
    return_stats: tuple[Stat, ...]


class PackedOutput(Output, total=False):
    """Keywords of a call of packed queries that returns the output."""

    score_mod: ScoreMod | None


class PackedPair(Pair, total=False):
    """Keywords of a call of packed queries that may return the lse or statistics too."""

    score_mod: ScoreMod | None


class LatentOutput(LatentOptions, total=False):
    """Keywords of a call of latent attention that returns the output."""

    qk_head_dim: int | None
    score_mod: ScoreMod | None
    layer: int | AnyArray | None
    return_lse: Literal[False]


class LatentPair(LatentOptions, total=False):
    """Keywords of a call of latent attention that may return the lse too."""

    qk_head_dim: int | None
    score_mod: ScoreMod | None
    layer: int | AnyArray | None
    return_lse: bool


class Settings(NamedTuple):
    """The keywords of a call with their defaults, made by `checked`."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    query_mod: VectorMod | None = None
    key_mod: VectorMod | None = None
    value_mod: VectorMod | None = None
    output_mod: OutputMod | None = None
    normalize: Literal["softmax", "none"] = "softmax"
    sinks: AnyArray | None = None
    scale: float | None = None
    return_lse: bool = False
    return_stats: tuple[Stat, ...] = ()
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    implementation: Requested = None
    config: Config | None = None
    # the mod of dropout of a call that evaluates its mods at other indices; None to make it in `kept`
    kept_mod: KeptMod | None = None

    @property
    def vectors(self) -> VectorMods:
        """The vector mods."""
        return VectorMods(self.query_mod, self.key_mod, self.value_mod, self.output_mod)

    def kept(self, batch: int | Int32[jax.Array, " rows"], heads: int) -> KeptMod | None:
        """The mod of dropout, True where a weight is kept; None without dropout. See `jflex._call.dropout.kept_mod`."""
        if not self.dropout_rate or self.kept_mod is not None:
            return self.kept_mod
        return kept_mod(self.dropout_rate, self.dropout_key, batch, heads)

    def results(self, computed: Any) -> Any:
        """The result of a call: the output, or a pair of it and the lse or the statistics, of fields of `computed`."""
        if self.return_stats:
            return computed.out, select_stats(computed, self.return_stats)
        return (computed.out, computed.lse) if self.return_lse else computed.out


def checked(**keywords: Any) -> Settings:
    """The settings of a call."""
    settings = Settings(**keywords)
    check_normalize(settings.normalize, settings.sinks)
    settings = settings._replace(implementation=hashable(settings.implementation))
    check_lse(settings.return_lse, settings.normalize)
    if settings.return_stats != ():
        stats = check_stats(settings.return_stats, settings.return_lse, settings.normalize)
        settings = settings._replace(return_stats=stats)
    rate = settings.dropout_rate
    if type(rate) is not float or rate or settings.dropout_key is not None:
        settings = settings._replace(dropout_rate=check_dropout(rate, settings.dropout_key))
    return settings


def takes(options: type[LatentOptions]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a public function with ``**options`` of this type: its signature names them, and it takes no others."""
    types = get_type_hints(options, include_extras=True)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in Settings._field_defaults.items()
        if name in types
    ]

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function, eval_str=True)
        *others, last = signature.parameters.values()
        assert last.kind is inspect.Parameter.VAR_KEYWORD
        function.__signature__ = signature.replace(parameters=[*others, *named])  # pyright: ignore[reportFunctionMemberAccess]
        return answers_keywords(function)

    return decorate
