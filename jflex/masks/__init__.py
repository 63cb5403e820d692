"""Ready mask_mods, by theme; each function returns a ``(b, h, q_idx, kv_idx) -> bool``.

Python numbers passed to them become part of the compiled program; arrays, also 0-d ones, are operands whose values may
change without recompiling. Combine them with ``and_masks``, ``or_masks`` and ``not_mask``.

They know the sizes that they were made for. A call with another batch size or number of heads, or positions beyond
their arrays, is refused.
"""

from jflex.masks.drafts import draft_blocks as draft_blocks
from jflex.masks.drafts import tree as tree
from jflex.masks.drafts import tree_ancestors as tree_ancestors
from jflex.masks.drafts import tree_bits as tree_bits
from jflex.masks.drafts import trees as trees
from jflex.masks.grids import morton_order as morton_order
from jflex.masks.grids import neighborhood as neighborhood
from jflex.masks.grids import reorder as reorder
from jflex.masks.grids import restore as restore
from jflex.masks.grids import tile_order as tile_order
from jflex.masks.images import sliding_tile as sliding_tile
from jflex.masks.images import spatial_head as spatial_head
from jflex.masks.images import temporal_head as temporal_head
from jflex.masks.images import vision_cross_attention as vision_cross_attention
from jflex.masks.packed import causal_document as causal_document
from jflex.masks.packed import document as document
from jflex.masks.packed import document_ids_from_lengths as document_ids_from_lengths
from jflex.masks.packed import shared_prefix as shared_prefix
from jflex.masks.sequences import batchify as batchify
from jflex.masks.sequences import block_diffusion as block_diffusion
from jflex.masks.sequences import causal as causal
from jflex.masks.sequences import dilated_window as dilated_window
from jflex.masks.sequences import global_tokens as global_tokens
from jflex.masks.sequences import padding as padding
from jflex.masks.sequences import prefix_lm as prefix_lm
from jflex.masks.sequences import sliding_window as sliding_window
