"""What users build with jflex: attention layers for Flax.

`flax_layers.nnx` holds the layers, `flax_layers.models` language models made of them; `python -m flax_layers.demo`
trains a small one.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "flax_layers needs Flax, which is not installed: pip install 'jflex[flax]'", name="flax"
    ) from None

from flax_layers import nnx

__all__ = ["nnx"]
