"""Rotary position embedding: `jflex.rope` makes ready vector mods; scalings for long contexts; `rotate`, for arrays."""

from jflex.rotary.rope import Rope as Rope
from jflex.rotary.rotation import rotate as rotate
from jflex.rotary.scaling import Length as Length
from jflex.rotary.scaling import LinearScaling as LinearScaling
from jflex.rotary.scaling import Llama3Scaling as Llama3Scaling
from jflex.rotary.scaling import LongRopeScaling as LongRopeScaling
from jflex.rotary.scaling import RotaryScaling as RotaryScaling
from jflex.rotary.scaling import YarnScaling as YarnScaling
