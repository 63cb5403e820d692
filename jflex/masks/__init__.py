"""Ready mask_mods, one idea a file; each function returns a ``(b, h, q_idx, kv_idx) -> bool``.

Python numbers passed to them become part of the compiled program; arrays, also 0-d ones, are operands whose values may
change without recompiling. Combine them with ``and_masks``, ``or_masks`` and ``not_mask``.

They know the sizes that they were made for. A call with another batch size or number of heads, or positions beyond
their arrays, is refused.
"""

from jflex.masks.batchify import batchify as batchify
from jflex.masks.block_diffusion import block_diffusion as block_diffusion
from jflex.masks.causal import causal as causal
from jflex.masks.dilated_window import dilated_window as dilated_window
from jflex.masks.document import causal_document as causal_document
from jflex.masks.document import document as document
from jflex.masks.document import document_ids_from_lengths as document_ids_from_lengths
from jflex.masks.draft_blocks import draft_blocks as draft_blocks
from jflex.masks.global_tokens import global_tokens as global_tokens
from jflex.masks.grid_order import morton_order as morton_order
from jflex.masks.grid_order import reorder as reorder
from jflex.masks.grid_order import restore as restore
from jflex.masks.grid_order import tile_order as tile_order
from jflex.masks.neighborhood import neighborhood as neighborhood
from jflex.masks.padding import padding as padding
from jflex.masks.prefix_lm import prefix_lm as prefix_lm
from jflex.masks.shared_prefix import shared_prefix as shared_prefix
from jflex.masks.sliding_tile import sliding_tile as sliding_tile
from jflex.masks.sliding_window import sliding_window as sliding_window
from jflex.masks.tree import tree as tree
from jflex.masks.tree import tree_ancestors as tree_ancestors
from jflex.masks.tree import tree_bits as tree_bits
from jflex.masks.tree import trees as trees
from jflex.masks.video_heads import spatial_head as spatial_head
from jflex.masks.video_heads import temporal_head as temporal_head
from jflex.masks.vision_cross_attention import vision_cross_attention as vision_cross_attention
