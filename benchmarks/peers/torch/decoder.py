"""A plain Llama in torch, as one would write it: compiled, with FlexAttention and a document mask."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

LOSS_CHUNK = 4096  # places whose logits are held at a time


@functools.cache
def compiled_block_mask():
    return torch.compile(create_block_mask)


def document_mask(documents: Tensor) -> BlockMask:
    """Causal, within each document."""
    rows, length = documents.shape

    def visible(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return compiled_block_mask()(visible, rows, None, length, length, device=documents.device)


class Block(nn.Module):
    """Attention and a gated MLP; projections of one input are one matrix."""

    def __init__(self, width: int, mlp_width: int, heads: tuple[int, int], size: int, epsilon=1e-6, dtype=None):
        super().__init__()
        self.heads, self.size = (*heads, heads[1]), size
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        self.project = linear(width, sum(self.heads) * size)
        self.out = linear(heads[0] * size, width)
        self.gate_and_up = linear(width, 2 * mlp_width)
        self.down = linear(mlp_width, width)
        self.attention_norm = nn.RMSNorm(width, epsilon, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(width, epsilon, dtype=dtype)

    def query_key_value(self, stream: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.project(self.attention_norm(stream)).view(*stream.shape[:2], sum(self.heads), self.size)
        query, key, value = projected.transpose(1, 2).split(self.heads, dim=1)
        return rotate(query, angles), rotate(key, angles), value

    def after_attention(self, stream: Tensor, attended: Tensor) -> Tensor:
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.mlp_norm(stream)).chunk(2, dim=-1)
        return stream + self.down(functional.silu(gate) * up)

    def forward(self, stream: Tensor, angles: Tensor, mask: BlockMask) -> Tensor:
        query, key, value = self.query_key_value(stream, angles)
        return self.after_attention(stream, flex_attention(query, key, value, block_mask=mask, enable_gqa=True))


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """The rotary embedding, in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)


def rotary_angles(length: int, size: int, base: float) -> Tensor:
    return torch.outer(torch.arange(length).float(), base ** -(torch.arange(0, size, 2) / size))


class Decoder(nn.Module):
    """The model of a `flax_layers.models.ModelConfig`, as far as Llama goes."""

    def __init__(self, config, length: int, remat: bool):
        super().__init__()
        sizes = (config.width, config.mlp_width, (config.num_heads, config.num_kv_heads), config.head_dim)
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(*sizes, config.norm_epsilon) for _ in config.layers)
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.remat = remat
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        self.register_buffer("angles", rotary_angles(length, config.head_dim, config.layers[0].rotary_base))

    def forward(self, tokens, mask):
        stream = self.embed(tokens).to(torch.bfloat16)
        for block in self.blocks:
            if self.remat:
                stream = checkpoint(block, stream, self.angles, mask, use_reentrant=False)
            else:
                stream = block(stream, self.angles, mask)
        return self.norm(stream)


def loss_of(model: Decoder, tokens, documents, mask) -> torch.Tensor:
    """Summed cross entropy of the next tokens within documents, chunk by chunk, logits computed again backward."""
    hidden = model(tokens, mask)[:, :-1].flatten(0, 1)
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], -100).flatten()

    def chunk_loss(hidden, targets):
        return functional.cross_entropy(model.head(hidden).float(), targets, ignore_index=-100, reduction="sum")

    parts = zip(hidden.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
    return torch.stack([checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]).sum()
