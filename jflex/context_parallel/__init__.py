"""Attention of sequences that are divided among devices: orders of tokens that balance their work.

The calls themselves are `jflex.context_parallel_attention` and, over pages, `jflex.context_parallel_paged_attention`.
"""

from jflex.context_parallel.call import STRATEGIES as STRATEGIES
from jflex.context_parallel.drawing import costs_to_image as costs_to_image
from jflex.context_parallel.order import balanced_order as balanced_order
from jflex.context_parallel.order import device_costs as device_costs
from jflex.context_parallel.order import positions as positions
from jflex.context_parallel.order import reorder as reorder
from jflex.context_parallel.order import restore as restore
from jflex.context_parallel.order import zigzag_order as zigzag_order
