"""Fields of other servers that this one lacks, refused by name unless their value changes nothing."""

from __future__ import annotations

import reprlib
from typing import NamedTuple


class ForeignField(NamedTuple):
    """A field that is not supported: the values that change nothing, beside null, and the remedy for others."""

    neutral: tuple[object, ...]
    remedy: str


def _fields(remedy: str, **neutral: tuple[object, ...]) -> dict[str, ForeignField]:
    return {name: ForeignField(values, remedy) for name, values in neutral.items()}


FOREIGN = {
    **_fields(
        "Constrain the text with `response_format`.",
        ebnf=(), guided_choice=(), guided_decoding_backend=(), guided_grammar=(), guided_json=(),
        guided_json_object=(False,), guided_regex=(), guided_whitespace_pattern=(), json_schema=(), regex=(),
        structural_tag=(), structured_outputs=(),
    ),
    **_fields("Set `logit_bias` to -100 for tokens that must not occur.", allowed_token_ids=()),
    **_fields("Use `stop` with texts, or `stop_token_ids`.", stop_regex=([],)),
    **_fields("Use `include_stop_str_in_output`.", no_stop_trim=(False,)),
    **_fields("Prepend the prompt yourself.", echo=(False,)),
    **_fields("Use `max_tokens`.", max_completion_tokens=(), max_new_tokens=()),
    **_fields("Use `min_tokens`.", min_new_tokens=(0,)),
    **_fields("Use `seed`.", sampling_seed=()),
    **_fields("Use `logprobs` with a number of tokens.", logprob_token_ids=(), top_logprobs=()),
    **_fields("Use `/tokenize` for the tokens of a text.", return_token_ids=(False,), return_token_offsets=(False,),
              return_token_strs=(False,), return_tokens_as_token_ids=(False,)),
    **_fields("Use `/v1/completions`, whose prompts are texts or tokens.", input_ids=(), prompt_embeds=()),
    **_fields("Shorten the prompt yourself.", truncate_prompt_tokens=()),
    **_fields("Use `tools` and `tool_choice` of `/v1/chat/completions`.", function_call=("none", "auto"),
              functions=([],), parallel_tool_calls=(True, False), tool_choice=("none", "auto"), tools=([],)),
    **_fields(
        "Render the chat yourself, and send it to `/v1/completions`.",
        add_generation_prompt=(True,), chat_template=(), chat_template_kwargs=({},), continue_final_message=(False,),
        documents=([],), reasoning=({},), reasoning_effort=("none",), separate_reasoning=(True, False), task=(),
        thinking_token_budget=(-1,),
    ),
    **_fields("Send the header `x-request-id`.", request_id=(), rid=()),
    **_fields("Use `cache_salt`.", extra_key=()),
    **_fields("Serve the adapter merged into its model.", lora_path=()),
    **_fields("Set `stream_options.include_usage`, which counts once, at the end.", continuous_usage_stats=(False,)),
    **_fields(
        "Leave it out.",
        audio=(), bootstrap_host=(), bootstrap_port=(), bootstrap_room=(), custom_logit_processor=(),
        custom_params=({},), data_parallel_rank=(), disagg_prefill_dp_rank=(), ec_transfer_params=({},),
        images_config=({},), include_reasoning=(True,), kv_transfer_params=({},), length_penalty=(1,),
        logits_processors=([],), max_dynamic_patch=(), media_io_kwargs=({},), min_dynamic_patch=(),
        mm_processor_kwargs=({},), modalities=(["text"],), moderation=(), ngram_corpus_id=(), prediction=(),
        priority=(0,), repetition_detection=(), return_cached_tokens_details=(False,),
        return_hidden_states=(False,), return_meta_info=(False,), return_prompt_text=(False,),
        return_prompt_token_ids=(False,), return_routed_experts=(False,), routed_dp_rank=(),
        routed_experts_prompt_start=(0,), routed_experts_start_len=(0,),
        session_params=({},), skip_special_tokens=(True,), spaces_between_special_tokens=(True,), store=(False,),
        stream_interval=(1,), stream_reasoning=(True,), suffix=("",), use_audio_in_video=(False,),
        use_beam_search=(False,), verbosity=("medium",), vllm_xargs=({},), watermarking=(False,),
        web_search_options=(),
    ),
}  # fmt: skip
"""Fields of OpenAI's, vLLM's and SGLang's APIs by name, from openai 3.57, vLLM at 002032e with names that it has
dropped, and SGLang at 004c82e. Labels of requests, as `user` and `metadata`, are not among them: they change no
answer."""


def check_foreign(fields: dict[str, object] | None, prefix: str = "") -> None:
    """Raises ValueError if one of the fields that the server does not know would change the answer.

    Example:
        >>> check_foreign({"echo": False, "nobody_defines_this": 1})
        >>> check_foreign({"min_new_tokens": 3})
        Traceback (most recent call last):
        ValueError: `min_new_tokens` is not supported by this server: it can only be 0. Got 3. Use `min_tokens`.
    """
    for name, value in (fields or {}).items():
        field = FOREIGN.get(name)
        if field is None or value is None or value in field.neutral:
            continue
        only = " or ".join(map(repr, field.neutral))
        rule = f"it can only be {only}" if only else "it must be left out"
        raise ValueError(
            f"`{prefix}{name}` is not supported by this server: {rule}. Got {reprlib.repr(value)}. {field.remedy}"
        )
