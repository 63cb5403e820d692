"""Ready score_mods, one idea a file; each function returns a ``(score, b, h, q_idx, kv_idx) -> score``.

Arrays passed to them are captured, and floating-point ones receive gradients. Calls with other sizes than those that
they were made for are refused, as for `jflex.masks`.
"""

from jflex.scores.activation import activation as activation
from jflex.scores.activation import undo_softmax as undo_softmax
from jflex.scores.alibi import alibi as alibi
from jflex.scores.alibi import alibi_slopes as alibi_slopes
from jflex.scores.bias import bias as bias
from jflex.scores.graph_bias import edge_bias as edge_bias
from jflex.scores.graph_bias import spatial_bias as spatial_bias
from jflex.scores.relative_bias import relative_bias as relative_bias
from jflex.scores.sandwich import sandwich as sandwich
from jflex.scores.sigmoid import sigmoid as sigmoid
from jflex.scores.softcap import softcap as softcap
from jflex.scores.t5_bias import t5_bias as t5_bias
