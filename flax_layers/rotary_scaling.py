"""Scaling of rotary embeddings for contexts longer than in pretraining: the names of `jflex.rotary`."""

from jflex.rotary import Length as Length
from jflex.rotary import LinearScaling as LinearScaling
from jflex.rotary import Llama3Scaling as Llama3Scaling
from jflex.rotary import LongRopeScaling as LongRopeScaling
from jflex.rotary import RotaryScaling as RotaryScaling
from jflex.rotary import YarnScaling as YarnScaling
