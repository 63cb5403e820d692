"""Attention layers and language models for Flax, built on jflex.

`flax_layers.nnx` and `flax_layers.linen` hold the layers, `flax_layers.models` language models made of them.
`python -m flax_layers.train` trains these, `python -m flax_layers.generate` writes text with them,
`python -m flax_layers.serve` serves them, and `python -m flax_layers.demo` trains a small one.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "flax_layers needs Flax, which is not installed: in a checkout, pip install -e '.[flax]'", name="flax"
    ) from None

from flax_layers import linen, nnx
from flax_layers.drop_in.attention_fn import attention_fn

__all__ = ["attention_fn", "linen", "nnx"]
