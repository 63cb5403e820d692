"""Makes the small checkpoints that tests read, with what `transformers` computes from them.

    python tests/goldens/make_checkpoints.py [FOLDER] [FAMILY ...]

It needs torch and transformers, which nothing else here does. A folder holds what `save_pretrained` writes, and
`expected.npz`: tokens [2, 24], their logits in float32, and 32 tokens that greedy decoding goes on with. The margin of
the best logit over the next is checked, so that rounding decides no token. Where the rotary embedding depends on the
length of the sequence, there are also logits of shorter prompts, and tokens that follow them beyond that length.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

PROMPT, STEPS, ROWS = 24, 32, 2
MARGIN = 2e-3

_SIZES = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "attn_implementation": "eager", "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 1.9, 3.7],
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.05, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_OF_KINDS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEEPSEEK_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0, "truncate": True}
_DEEPSEEK = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
}  # fmt: skip
_SMALLER = {"vocab_size": 128, "num_hidden_layers": 2}
_GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 12, "sliding_window": 7, "tie_word_embeddings": True}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# The length of the shorter prompts.
SHORT_PROMPTS = {"phi3": 13}

# Name: class of the model, its dtype in the file, what its configuration sets.
CASES = {
    "llama2": ("Llama", "float32", {"num_key_value_heads": 6, "num_hidden_layers": 2}),
    "llama3": ("Llama", "bfloat16", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 10}),
    "llama_linear": ("Llama", "float16", {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", "bfloat16", {"sliding_window": 9, "head_dim": 14}),
    "ministral": ("Ministral", "bfloat16", {
        **_SMALLER, "sliding_window": 9, "head_dim": 14, "layer_types": [_FULL, _SLIDING],
    }),
    "qwen2": ("Qwen2", "bfloat16", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", "bfloat16", {"head_dim": 18, "num_key_value_heads": 3}),
    "qwen3_yarn": ("Qwen3", "bfloat16", {"head_dim": 16, "num_hidden_layers": 2, "rope_parameters": _YARN}),
    "gemma2": ("Gemma2", "bfloat16", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", "bfloat16", {
        **_GEMMA, "num_hidden_layers": 4, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        "rope_parameters": _OF_KINDS,
    }),
    "phi3": ("Phi3", "bfloat16", {
        "rope_parameters": _LONGROPE, "original_max_position_embeddings": 16, "sliding_window": 11,
    }),
    "deepseek_v2": ("DeepseekV2", "bfloat16", {
        **_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0,
        "n_shared_experts": 2,
    }),
    "deepseek_v3": ("DeepseekV3", "bfloat16", {
        **_DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 1, "rope_parameters": _DEEPSEEK_YARN,
        "rms_norm_eps": 1e-2,  # but for the latent vectors, whose norms have 1e-6
    }),
    "mixtral": ("Mixtral", "bfloat16", {
        **_SMALLER, "intermediate_size": 24, "num_local_experts": 4, "sliding_window": 11,
    }),
    "qwen3_moe": ("Qwen3Moe", "bfloat16", {
        **_SMALLER, "num_hidden_layers": 3, "head_dim": 10, "intermediate_size": 32, "mlp_only_layers": [1],
        "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True,
    }),
    "gpt_oss": ("GptOss", "bfloat16", {
        **_SMALLER, "head_dim": 10, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 7, "rope_parameters": _YARN,
        "swiglu_limit": 1.5,  # so that it bounds some
    }),
}  # fmt: skip


def make(name: str, folder: pathlib.Path) -> None:
    kind, dtype, options = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **options})
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    seed, margin = 0, 0.0
    while margin < MARGIN:
        generator = torch.Generator().manual_seed(seed := seed + 1)
        model = model_class(config).eval()
        draw_parameters(model, generator, getattr(torch, dtype))
        tokens = torch.randint(3, config.vocab_size, (ROWS, PROMPT), generator=generator)
        with torch.no_grad():
            logits = model(tokens).logits
            greedy, margin = continue_greedily(model, tokens)
    expected = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), "greedy": greedy.astype(np.int32)}
    if name in SHORT_PROMPTS:
        prompts = tokens[:, : SHORT_PROMPTS[name]]
        with torch.no_grad():
            short_logits = model(prompts).logits
            short_greedy, short_margin = continue_greedily(model, prompts)
        assert short_margin >= MARGIN, f"{name}: choose another length; the margin is {short_margin}"
        expected |= {"short_logits": short_logits.numpy(), "short_greedy": short_greedy.astype(np.int32)}
    # Two files for one of them: an index names which tensor is where.
    for path, parameter in model.named_parameters():
        # What selects experts of DeepSeek: `transformers` keeps it in float32.
        if not (kind.startswith("Deepseek") and path.endswith(".mlp.gate.weight")):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100KB" if name == "llama3" else "1GB")
    np.savez_compressed(folder / "expected.npz", **expected)
    kinds = len(np.unique(greedy))
    print(f"{name}: seed {seed}, margin {margin:.4f}, logits up to {logits.abs().max():.2f}, {kinds} different tokens")


@torch.no_grad()
def draw_parameters(model: torch.nn.Module, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Numbers that the file's dtype holds. (`model.to` would round the rotary frequencies, too.)"""
    gemma = "Gemma" in type(model).__name__
    for path, parameter in sorted(model.named_parameters()):
        scales = path.endswith("norm.weight") and not gemma
        spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
        if gemma:  # small embeddings and large blocks; else each token repeats itself, for the embedding is tied
            if path.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                scales, spread = True, 1.0
            if path == "model.embed_tokens.weight":
                spread /= 8
            if path == "model.norm.weight":
                scales, spread = True, 4.0
        parameter.normal_(1.0 if scales else 0.0, spread, generator=generator)
        parameter.copy_(parameter.to(dtype))
    for path, buffer in sorted(model.named_buffers()):
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=generator)


def continue_greedily(model, tokens: torch.Tensor) -> tuple[np.ndarray, float]:
    """32 tokens, each from all tokens before it, without a cache; and the least margin."""
    margin, row = float("inf"), tokens
    for _ in range(STEPS):
        best = model(row, use_cache=False).logits[:, -1].topk(2)
        margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        row = torch.cat([row, best.indices[:, :1]], dim=1)
    return row[:, tokens.shape[1] :].numpy(), margin


TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role not in ("user", "assistant") %}
    {{- raise_exception("unknown role " + message.role) }}
  {%- endif %}
<|{{ message.role }}|>
{{ message.content | trim }}{{ eos_token }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
TEXTS = ["attention is all you need", "naïve café, 東京 😀", "<s>user</s> two\n\nlines"]
CHAT = [{"role": "user", "content": " who sees whom? "}, {"role": "assistant", "content": "ask the mask"}]


def make_tokenizer(folder: pathlib.Path) -> None:
    """Byte-level BPE with a template for chats, and what `transformers` makes of some texts."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEMPLATE, *TEXTS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    expected = {
        "texts": [{"text": text, "tokens": tokenizer(text)["input_ids"]} for text in TEXTS],
        "chat": CHAT,
        "prompt": tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
        "with_tools": tokenizer.apply_chat_template(CHAT, tokenize=False, tools=[{"name": "é"}]),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    here = pathlib.Path(__file__).parent
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here
    for name in sys.argv[2:] or [*CASES, "tokenizer"]:
        if name == "tokenizer":
            make_tokenizer(root / name)
        else:
            make(name, root / name)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    path = root / "versions.json"
    if sys.argv[2:]:  # beside those of the others
        versions = json.loads(path.read_text() if path.exists() else "{}") | dict.fromkeys(sys.argv[2:], versions)
    path.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
