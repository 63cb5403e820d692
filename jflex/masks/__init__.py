"""Ready mask_mods, one idea a file; each function returns a ``(b, h, q_idx, kv_idx) -> bool``.

Python numbers passed to them become part of the compiled program; arrays, also 0-d ones, are operands whose values may
change without recompiling. Combine them with ``and_masks``, ``or_masks`` and ``not_mask``.

They know the sizes that they were made for. A call with another batch size or number of heads, or positions beyond
their arrays, is refused. In your own mods, an index beyond an array reads its last element, as always in JAX.
"""

from jflex.masks.block_diffusion import block_diffusion as block_diffusion
from jflex.masks.causal import causal as causal
from jflex.masks.dilated_window import dilated_window as dilated_window
from jflex.masks.document import document as document
from jflex.masks.document import document_ids_from_lengths as document_ids_from_lengths
from jflex.masks.global_tokens import global_tokens as global_tokens
from jflex.masks.neighborhood import neighborhood as neighborhood
from jflex.masks.padding import padding as padding
from jflex.masks.prefix_lm import prefix_lm as prefix_lm
from jflex.masks.sliding_window import sliding_window as sliding_window
from jflex.masks.tree import tree as tree
from jflex.masks.tree import tree_ancestors as tree_ancestors
from jflex.masks.tree import tree_bits as tree_bits
from jflex.masks.tree import trees as trees
