"""One decoder for all families; a `ModelConfig` describes the differences."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.models import mods
from flax_layers.models.block import AnyCache, Block, MakeScoreMod, ModuleOptions, Pages
from flax_layers.models.config import ModelConfig
from flax_layers.nnx import RMSNorm, SharedPrefix
from jflex.paged import PagedBatch

Caches = tuple[AnyCache, ...]
"""The caches of all layers."""


class Decoder(nnx.Module):
    """A causal language model that processes whole sequences, or decodes with a dense or a paged cache.

    Rotary positions count along a row, across its documents. Scores depend only on differences of positions, so it does
    not matter where a document begins.

    Args:
        dtype: Dtype of the computation; parameters are cast to it. Default: `param_dtype`.
        param_dtype: Dtype of the parameters.
        score_mod: Takes `rngs` and makes a module with parameters, the score_mod of a layer. Default: no score_mod.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        attention_config: Tile sizes and promises of its attention, for `FlexAttention`. Default: jflex chooses.
        rngs: Source of the keys of the initializers.

    Example:
        >>> from flax_layers.models.config import LayerConfig
        >>> config = ModelConfig(
        ...     vocabulary=256, width=32, mlp_width=64, num_heads=4, num_kv_heads=2, head_dim=8,
        ...     layers=(LayerConfig(window=4), LayerConfig()), max_positions=64,
        ... )
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.arange(10)[None]
        >>> logits, caches = model.decode(tokens, model.init_caches(1, max_length=16))
        >>> print(logits.shape, jnp.allclose(logits, model(tokens), atol=1e-5))
        (1, 10, 256) True
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        score_mod: MakeScoreMod | None = None,
        implementation: str | tuple[str, ...] | None = None,
        attention_config: jflex.Config | None = None,
        rngs: nnx.Rngs,
    ):
        options: ModuleOptions = {"dtype": dtype or param_dtype, "param_dtype": param_dtype, "rngs": rngs}
        normal = nnx.initializers.normal(config.initializer_range)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, **options)
        block = functools.partial(Block, config, score_mod=score_mod, implementation=implementation)
        block = functools.partial(block, attention_config=attention_config, **options)
        self.blocks = nnx.List([block(layer) for layer in config.layers])
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, offset=config.norm_offset, **options)
        head = None
        if not config.tied_embeddings:
            head = nnx.Linear(config.width, config.vocabulary, use_bias=False, kernel_init=normal, **options)
        self.head = nnx.data(head)
        self.config, self.attention_config = config, attention_config

    def __call__(
        self, tokens: Int[Array, "B T"], documents: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T vocabulary"]:
        """Returns the float32 logits of the token after each token; see `hidden`."""
        return self.logits(self.hidden(tokens, documents))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        documents: Int[Array, "B T"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        *,
        remat: bool | Callable[..., bool] = False,
        constrain: Callable[[Array], Array] = lambda stream: stream,
        context: ContextParallel | None = None,
    ) -> Float[Array, "B T width"]:
        """The last hidden states, after the final norm, in the dtype of the computation. `logits` takes them.

        Args:
            tokens: Rows of tokens, in the order of `context`.
            documents: Document id of each token; tokens attend only within their document. Default: one per row.
                In the natural order of the tokens, whatever the order of `context`.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ... in each row.
            remat: Whether the backward pass recomputes blocks. True saves the residuals of attention
                (`flax_layers.models.mods.remat_policy`). You can also pass a policy of `jax.checkpoint_policies`.
            constrain: Applied to the residual stream before each block and after the last, to set its sharding, for
                example.
            context: How tokens are divided among devices; the result is in its order, too. Default: each
                device attends to whole sequences.

        Raises:
            ValueError: Rows are longer than the model's positions, or there is a `context` with latent attention.
        """
        self._check_latent("context", context)
        rows, length = tokens.shape
        self._check_length("tokens", length)
        masks = mods.training_masks(self.config, rows, length, documents, context)
        apply = lambda block, stream, mask, positions: block(stream, mask, positions, context)
        if remat:
            apply = nnx.remat(apply, policy=mods.remat_policy() if remat is True else remat)
        stream = constrain(self._embed(tokens))
        for block in self.blocks:
            stream = constrain(apply(block, stream, masks[block.layer.window], positions))
        return self.norm(stream)

    def logits(self, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch vocabulary"]:
        """The logits of hidden states, of all tokens or of one chunk at a time; float32, accumulated in float32."""
        kernel = self.head_kernel().astype(hidden.dtype)
        contraction = (((hidden.ndim - 1,), (0,)), ((), ()))
        logits = jax.lax.dot_general(hidden, kernel, contraction, preferred_element_type=jnp.float32)
        cap = self.config.logits_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def head_kernel(self) -> Float[Array, "width vocabulary"]:
        """The output projection: the transposed embeddings, if they are tied."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]

    def init_caches(self, batch: int, max_length: int, *, dtype: Dtype | None = None) -> Caches:
        """Dense caches of empty sequences, one for each layer, for `decode`.

        Args:
            batch: Number of sequences, B.
            max_length: Capacity of each, in tokens. It selects the factors of LongRoPE.
            dtype: Dtype of keys and values, of eight bits too but for latent attention. Default: the dtype of
                the computation.

        Raises:
            ValueError: `max_length` is greater than the model's positions.
        """
        self._check_length("max_length", max_length)
        return tuple(block.attention.init_cache(batch, max_length, dtype=dtype) for block in self.blocks)

    def decode(self, tokens: Int[Array, "B T"], caches: Caches) -> tuple[Float[Array, "B T vocabulary"], Caches]:
        """Appends T tokens to each sequence.

        Args:
            tokens: The next tokens of each sequence: a prompt, one token, or a few speculated ones.
            caches: From `init_caches` or from the last call. Donate them to `jit` to update them in place.

        Returns:
            For each token the logits of the token after it, and the caches with the tokens.
        """
        hidden, caches = self.decode_hidden(tokens, caches)
        return self.logits(hidden), caches

    def decode_hidden(self, tokens: Int[Array, "B T"], caches: Caches) -> tuple[Float[Array, "B T width"], Caches]:
        """See `decode`; returns hidden states. After a prompt, pass only the last one to `logits`."""
        masks = mods.cache_masks(self.config, caches[0], tokens.shape[1])
        stream, written = self._embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            stream, cache = block.decode(stream, cache, masks[block.layer.window])
            written.append(cache)
        return self.norm(stream), tuple(written)

    def init_paged_cache(self, num_pages: int, page_size: int, *, dtype: Dtype | None = None) -> Pages:
        """A paged cache that all layers share, for `decode_paged`.

        Args:
            num_pages: Number of pages, including page 0, which holds no tokens.
            page_size: Tokens in a page.
            dtype: Dtype of keys and values. Default: the dtype of the computation.
        """
        attention = self.blocks[0].attention
        return attention.init_paged_cache(num_pages, page_size, layers=len(self.blocks), dtype=dtype)

    def decode_paged(
        self, tokens: Int[Array, " N"], cache: Pages, batch: PagedBatch, streaming: Streaming | None = None
    ) -> tuple[Float[Array, "N vocabulary"], Pages]:
        """Appends to requests, each by as many tokens as it has in `tokens`.

        Args:
            tokens: The next tokens of all requests, packed.
            cache: From `init_paged_cache` or from the last call. Donate it to `jit` to update it in place.
            batch: The tokens and the pages of each request. The capacity of the page table selects the factors of
                LongRoPE.
            streaming: Attends to sinks and a window alone, in sequences of any length; in every call on a cache, which
                then holds raw keys, or in none. Its size selects the factors of LongRoPE.

        Returns:
            For each token the logits of the token after it, and the cache with the tokens.

        Raises:
            ValueError: Sinks and window together are longer than the model's positions, or with latent attention.
        """
        hidden, cache = self.decode_paged_hidden(tokens, cache, batch, streaming=streaming)
        return self.logits(hidden), cache

    def decode_paged_hidden(
        self,
        tokens: Int[Array, " N"],
        cache: Pages,
        batch: PagedBatch,
        shared_prefix: SharedPrefix | None = None,
        streaming: Streaming | None = None,
    ) -> tuple[Float[Array, "N width"], Pages]:
        """See `decode_paged`; returns hidden states.

        With a `shared_prefix`, the first requests begin with the same pages, and each request has one token in this
        call: layers without a window read these pages once for all.

        Raises:
            ValueError: As for `decode_paged`; or there are a shared prefix and latent attention.
        """
        self._check_latent("shared_prefix", shared_prefix)
        self._check_latent("streaming", streaming)
        if streaming is not None:
            self._check_length("streaming", streaming.size)
        stream = self._embed(tokens)
        for layer, block in enumerate(self.blocks):
            stream, cache = block.decode_paged(stream, cache, batch, layer, shared_prefix, streaming)
        return self.norm(stream), cache

    def _check_length(self, name: str, length: int) -> None:
        if length > self.config.max_positions:
            raise ValueError(
                f"`{name}` must not be longer than the {self.config.max_positions} positions of the model. Got "
                f"{length}. Truncate rows, or set `max_positions` and a `rotary_scaling` for longer contexts."
            )

    def _check_latent(self, name: str, option: object) -> None:
        if option is not None and self.config.latent is not None:
            raise ValueError(
                f"`{name}` must be None for a model with latent attention, which does not take it. Got "
                f"{type(option).__name__}. Leave it out."
            )

    def _embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
        # Take, then cast: the gradients of repeated tokens are summed in the dtype of the parameters.
        # Lookups of tokens sharded over explicit axes need the sharding of their results.
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        sharding = jax.P(*jax.typeof(tokens).sharding.spec, None) if explicit else None
        rows = self.embed.embedding[...].at[tokens].get(mode="fill", out_sharding=sharding)
        stream = rows.astype(self.embed.dtype)
        return stream * jnp.asarray(self.config.embedding_scale, stream.dtype)
