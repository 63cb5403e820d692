"""A plain Llama in torch, as one would write it: compiled, with FlexAttention and a document mask."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

LOSS_CHUNK = 4096
"""Places whose logits are held at a time."""

compiled_block_mask = torch.compile(create_block_mask)


def document_mask(documents: torch.Tensor) -> BlockMask:
    """Causal, within each document."""
    rows, length = documents.shape

    def visible(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return compiled_block_mask(visible, rows, None, length, length, device=documents.device)


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_heads, config.num_kv_heads, config.head_dim
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        self.query = linear(config.width, self.heads * self.size)
        self.key = linear(config.width, self.kv_heads * self.size)
        self.value = linear(config.width, self.kv_heads * self.size)
        self.out = linear(self.heads * self.size, config.width)
        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)
        self.attention_norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_epsilon)

    def forward(self, stream, cosine, sine, mask):
        inputs = self.attention_norm(stream)
        split = lambda x, heads: x.view(*x.shape[:2], heads, self.size).transpose(1, 2)
        query = rotate(split(self.query(inputs), self.heads), cosine, sine)
        key = rotate(split(self.key(inputs), self.kv_heads), cosine, sine)
        value = split(self.value(inputs), self.kv_heads)
        attended = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        inputs = self.mlp_norm(stream)
        return stream + self.down(functional.silu(self.gate(inputs)) * self.up(inputs))


def rotate(heads, cosine, sine):
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)


class Decoder(nn.Module):
    """The model of a `flax_layers.models.ModelConfig`, as far as Llama goes."""

    def __init__(self, config, length: int, remat: bool):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in config.layers)
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.remat = remat
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(length), config.layers[0].rotary_base ** -exponents)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens, mask):
        stream = self.embed(tokens).to(torch.bfloat16)
        for block in self.blocks:
            if self.remat:
                stream = checkpoint(block, stream, self.cosine, self.sine, mask, use_reentrant=False)
            else:
                stream = block(stream, self.cosine, self.sine, mask)
        return self.norm(stream)


def loss_of(model: Decoder, tokens, documents, mask) -> torch.Tensor:
    """Summed cross entropy of the next tokens within documents, chunk by chunk, logits computed again backward."""
    hidden = model(tokens, mask)[:, :-1].flatten(0, 1)
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], -100).flatten()

    def chunk_loss(hidden, targets):
        return functional.cross_entropy(model.head(hidden).float(), targets, ignore_index=-100, reduction="sum")

    parts = zip(hidden.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
    return torch.stack([checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts]).sum()
