"""Makes `latent_attention.npz`: the attention of small DeepSeek-V3 layers, by `transformers`.

    python tests/goldens/make_latent_attention.py [FILE]

It needs torch and transformers. The file holds inputs, weights by their names there, and outputs, which are computed in
float64; once with latent queries, and once without.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

SIZES = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "attn_implementation": "eager",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 2.0, "beta_slow": 0.05, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CASES = {
    "latent_queries": {"q_lora_rank": 20},
    "direct_queries": {"q_lora_rank": None, "rope_interleave": False},
    "yarn": {"q_lora_rank": 20, "rope_parameters": YARN},
}
BATCH, LENGTH = 2, 40


def arrays(name: str, options: dict) -> dict[str, np.ndarray]:
    """Inputs, weights and outputs of one layer."""
    torch.manual_seed(0)
    config = DeepseekV3Config(**SIZES, **options)
    layer = deepseek.DeepseekV3Attention(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    inputs, positions = torch.randn(BATCH, LENGTH, config.hidden_size), torch.arange(LENGTH)[None]
    found = {f"{name}/{key}": x.detach().numpy() for key, x in layer.named_parameters()}
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = deepseek.DeepseekV3RotaryEmbedding(config)(inputs.double(), positions)
    with torch.no_grad():
        outputs, _ = layer.double()(inputs.double(), angles, mask)
    return found | {
        f"{name}/inputs": inputs.numpy(),
        f"{name}/outputs": outputs.numpy(),
        f"{name}/scale": layer.scaling,
    }


def main() -> None:
    """Writes the file."""
    target = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "latent_attention.npz")
    found = {}
    for name, options in CASES.items():
        found |= arrays(name, options)
    np.savez_compressed(target, **found)


if __name__ == "__main__":
    main()
