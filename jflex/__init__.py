"""FlexAttention for JAX: attention whose scores and sparsity are ordinary JAX functions, fused into GPU kernels.

Letters, everywhere: ``B`` batch, ``T`` queries, ``S`` keys, ``Hq`` and ``Hkv`` heads, ``D`` and ``Dv`` head sizes;
inside of mods ``b``, ``h`` (query head), ``q_idx``, ``kv_idx``.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jflex import context_parallel as context_parallel
from jflex import masks as masks
from jflex import paged as paged
from jflex import rotary as rotary
from jflex import scores as scores
from jflex._call.dispatch import ORDER as ORDER
from jflex.apply_mod import apply_vector_mod as apply_vector_mod
from jflex.attention import flex_attention as flex_attention
from jflex.backends.xla.narrow import set_rows as set_rows
from jflex.block_mask.dense import create_mask as create_mask
from jflex.block_mask.mask import BlockMask as BlockMask
from jflex.block_mask.mask import create_block_mask as create_block_mask
from jflex.block_mask.varlen_mask import VarlenBlockMask as VarlenBlockMask
from jflex.block_mask.varlen_mask import varlen_block_mask as varlen_block_mask
from jflex.cascade.attention import cascade_attention as cascade_attention
from jflex.cascade.level import CascadeLevel as CascadeLevel
from jflex.cascade.shared_prefix import shared_prefix_levels as shared_prefix_levels
from jflex.config import Config as Config
from jflex.config import Tiles as Tiles
from jflex.context_parallel.attention import context_parallel_attention as context_parallel_attention
from jflex.context_parallel.paged import context_parallel_paged_attention as context_parallel_paged_attention
from jflex.errors import UnsupportedError as UnsupportedError
from jflex.explain import explain as explain
from jflex.jax_nn import dot_product_attention as dot_product_attention
from jflex.latent.attention import mla_attention as mla_attention
from jflex.latent.indexer import indexer_loss as indexer_loss
from jflex.latent.indexer import indexer_scores as indexer_scores
from jflex.latent.indexer import select_keys as select_keys
from jflex.latent.sparse import sparse_mla_attention as sparse_mla_attention
from jflex.mods.array_sizes import check_mod_sizes as check_mod_sizes
from jflex.mods.compose import and_masks as and_masks
from jflex.mods.compose import noop_mask as noop_mask
from jflex.mods.compose import not_mask as not_mask
from jflex.mods.compose import or_masks as or_masks
from jflex.mods.offset import with_offset as with_offset
from jflex.mods.types import MaskMod as MaskMod
from jflex.mods.types import OutputMod as OutputMod
from jflex.mods.types import ScoreMod as ScoreMod
from jflex.mods.types import VectorMod as VectorMod
from jflex.paged.attention import paged_attention as paged_attention
from jflex.rotary.rope import rope as rope
from jflex.sparse.block_rows import BlockSparseRows as BlockSparseRows
from jflex.sparse.from_indices import block_mask_from_indices as block_mask_from_indices
from jflex.sparse.selection import block_scores as block_scores
from jflex.sparse.selection import select_blocks as select_blocks
from jflex.states.lse import lse_from_base2 as lse_from_base2
from jflex.states.lse import lse_from_flash as lse_from_flash
from jflex.states.lse import lse_to_base2 as lse_to_base2
from jflex.states.merging import merge as merge
from jflex.states.merging import merge_all as merge_all
from jflex.states.merging import with_sinks as with_sinks
from jflex.states.state import AttentionState as AttentionState
from jflex.states.stats import AttentionStats as AttentionStats
from jflex.states.stats import Stat as Stat
from jflex.varlen import flex_attention_varlen as flex_attention_varlen
from jflex.weights import attention_weights as attention_weights

try:
    __version__ = _version("jflex")
except _PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+checkout"
