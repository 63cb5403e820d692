"""Ready score_mods, by theme; each function returns a ``(score, b, h, q_idx, kv_idx) -> score``.

Arrays passed to them are captured, and floating-point ones receive gradients. Calls with other sizes than those that
they were made for are refused, as for `jflex.masks`.
"""

from jflex.scores.bias import bias as bias
from jflex.scores.bias import edge_bias as edge_bias
from jflex.scores.bias import spatial_bias as spatial_bias
from jflex.scores.distance import alibi as alibi
from jflex.scores.distance import alibi_slopes as alibi_slopes
from jflex.scores.distance import relative_bias as relative_bias
from jflex.scores.distance import sandwich as sandwich
from jflex.scores.distance import t5_bias as t5_bias
from jflex.scores.pointwise import activation as activation
from jflex.scores.pointwise import sigmoid as sigmoid
from jflex.scores.pointwise import softcap as softcap
from jflex.scores.pointwise import undo_softmax as undo_softmax
