"""Which tests the README's command runs: each feature on each implementation at least once, in a few minutes.

All others are marked by purpose: ``full``, ``compile`` (for a GPU that is not there) or ``bench`` (the benchmarks and
the demo). `.ci/run` runs all of them, but those marked ``long``, which repeat others in more cases. Seconds of a test
decide: `pytest --durations=50` tells them.
"""

import collections
import re
import zlib
from collections.abc import Iterable

COMPILE = {
    "test_compile", "test_indexer_compile", "test_official_compile", "test_paged_compile", "test_primitive_kernels",
}  # fmt: skip
BENCHMARKS = {
    "test_benchmarks", "test_benchmarks_devices", "test_benchmarks_engine", "test_benchmarks_generation",
    "test_benchmarks_questions", "test_benchmarks_run", "test_benchmarks_serving", "test_benchmarks_sparse",
    "test_benchmarks_streaming", "test_benchmarks_training",
}  # fmt: skip
BENCH = BENCHMARKS | {"test_demo", "test_demo_generation", "test_report", "test_tuning", "test_wheel"}

# Of the tables of cases: a mod of each family, each form of a mask, decoding, each dtype and layout, a refusal.
CASES = {
    "bnth", "causal", "decode", "dropout", "head_size_300", "sigmoid", "sinks", "slopes", "softcap", "sorting",
    "two_groups",
}  # fmt: skip
# Of these, `xla` compiles the others without most optimisations: half the time.
COMPILED_AS_USERS = {"causal"}
TABLES = {
    "test_attention_weights", "test_backward", "test_captured_gradients", "test_forward", "test_hopper", "test_oracle",
}  # fmt: skip

# What stays in the short run of modules that take long, by a pattern of test and parameters.
SHORT = {
    "test_block_mask": r"^(?!.*(random_masks|many_steps|building|offset_causal|dense.*lengths[01]|block.lengths0))",
    "test_block_states": r"known_tables.*4|never_cut|in_no_order|(masks|table)\[c|structure\[(causal|doc)",
    "test_oracle": r"causal|tolerance|names",
    "test_readme": r"^(?!.*blocks_run)|\[README",
    "test_64_bits": r"refused|stay_so",
    "test_attention_fn": r"refused|every_argument|nnx-grouped|linen-bias of heads",
    "test_attention_fn_blocks": r"skips_blocks\[(nothing|block_mask, mask)|tiles",
    "test_attention_fn_layers": r"refused|in_decode_caches\[block_mask-nnx-batch3",
    "test_attention_weights": r"oracle\[(causal|sinks)|gradients_as_of",
    "test_batch_invariance": r"refuses|error|tiles_and|explain|prefilled\[causal|prefilled\[alibi-xla",
    "test_batchable": r"branches_take.*(nested|switch)",
    "test_block_mask_algebra": r"getitem.*refuses|join.*both axes-listed\]|cropped|lengths|traced",
    "test_bounds": r"seen",
    "test_cascade": r"worked_example\[(each_seq|composable-xla)|gradient"
    r"|on_every_backend\[.*(xla|triton).*(dense|two)",
    "test_checkpoints": r"read\[(gemma3|phi3)|several|device|divide|differences|full"
    r"|interrupted|other|wrong",
    "test_context_parallel": r"float64\[causal-ring",
    "test_context_parallel_arguments": r"$^",
    "test_context_parallel_collectives": r"$^",
    "test_context_parallel_explain": r"of_the_mask\[ring|printed",
    "test_context_parallel_meshes": r"$^",
    "test_context_parallel_orders": r"zigzag",
    "test_context_parallel_paged": r"wrong|only_states",
    "test_context_parallel_queries": r"explicit_mesh|plain_jit.*\[lists-xla",
    "test_constraints": r"refused(?!.*slow)",
    "test_containment": r"padding.*xla|pages.*xla-mixed-16|pages.*xla.*mixed.*16",
    "test_decode_hopper": r"refuses|packing|tiles|once|rest|one_tile|float64\[hopper_head_sizes",
    "test_determinism": r"by_name.*distances|never_refused|run\[rows-xla",
    "test_deepseek": r"wrong|hub|not_written|not_hold|refused\[|flops|divided",
    "test_dispatch": r"^(?!.*test_tiles_of_the_user)|16-64",
    "test_drafts": r"naive|longer|bits|follows.*8",
    "test_dropout": r"rate_of_0.*xla|generator.*triton|lse.*xla|new_key|binomial.*0\.1|0\.1-|old_keys|refuses"
    r"|explain",
    "test_eight_bit_queries": r"gradients|forward_mode|explain|preferred|few_queries|ampere|wrong|other_calls|("
    r"xla-eight_no_mask|t-eight_head|emulated-eight_head)",
    "test_engine": r"preemption",
    "test_engine_eight_bits": r"wrong|poison|near.*e4m3",
    "test_engine_invariance": r"promise|refused",
    "test_engine_speculation": r"wrong|shapes",
    "test_equinox": r"own_layer",
    "test_experts": r"float64\[(sigmoid|clamped)|nan|equal|wrong",
    "test_explain": r"^(?!test_(paged_cases|packed_cases|cascade_cases|wrong))|wrong.*(cpu|plain_mask|positions\])"
    r"|\[mixed-triton",
    "test_doctests": r"jflex\.(attention|explain|config|mods)",
    "test_dot_product_attention": r"(two|causal_padding|long_mask)-float32-xla"
    r"|long_mask-bfloat16-triton-int|unbatched_res|shared",
    "test_dot_product_attention_blocks": r"skipped|traced|left_out|constant|keys\[is|take|signature|message",
    "test_fp8_files": r"wrong|refused|object|scale\[deepseek_v3|ragged|device",
    "test_fused": r"separate.*qwen2|product|mesh|wrong",
    "test_generate": r"greedy_tokens.*paged|in_place\[dense|window|wrong|buckets",
    "test_generate_command": r"text_of_a|file_of|wrong|template|dtypes|pieces|cuts",
    "test_indexer": r"float64|order|selection_in_parts\[.*7\]|memory|indexer_scores|causal|loss|nothing|without"
    r"|message",
    "test_hopper_emulated": r"results.*slopes|tma|phase",
    "test_hopper": r"two_groups_many",
    "test_hopper_selection": r"refuse|first|explain",
    "test_import_cost": r"^(?!.*without_starlette)",
    "test_intervals": r"counts?_for_nothing|believed",
    "test_jax_nn": r"bias|window|residual",
    "test_kv_lengths": r"one_program.*xla|traced_lengths|explain|triton.*length_one_query|message",
    "test_layer_decoding": r"dense_calls_of_any_length.*alibi-xla-nnx|room_in_eight_bits.*nnx",
    "test_layer_decoding_errors": r"nnx",
    "test_layer_decoding_steps": r"paged.*update_the_cache.*nnx",
    "test_layer_dropout": r"^(?!.*(decoding|rate_of_0)).*nnx|wrong|linen_makes",
    "test_layer_options": r"^(?!.*block_mask_for)",
    "test_layer_transforms": r"message",
    "test_latent_hopper": r"fill_tiles|refuses|preferred|declared|float64\[hopper_softcap",
    "test_latent_layers": r"transformers\[latent_queries|scale.*latent"
    r"|gradients.*nnx|form_follows|message",
    "test_layers": r"captured_parameters.*xla-nnx|(attention_between|rotary).*nnx|rotate|wrong",
    "test_masks": r"^(?!.*(groups (of|by)|Morton, high|even window|first frame|of a video|traced text|short ones))",
    "test_latent_eight_bits": r"bit_for_bit\[float32-None|656|finite|float64\[xla-tiles_mixed\]|wrong|lack|explain",
    "test_mla": r"float64\[.*latent_decode|bfloat16\[triton-interpret-latent_128|in_float64$"
    r"|sharded.*xla|explain|refuses|zeros|writing",
    "test_mod_sizes_fit": r"causal|alibi|document",
    "test_mod_traps": r"\[0|division",
    "test_models": r"transformers\[(gemma3|deepseek_v3|gpt_oss)|"
    r"share|wrong",
    "test_narrow": r"rows_are_set|paged_decoding|any_bits.*bfloat16|larger.*write-bfloat16",
    "test_official_triton": r"^(?!.*(without_the_triton|in_the_interpreter|same_calls))",
    "test_page_pool": r"^(?!.*(machine|runTest))",
    "test_paged_attention": r"one_visible_key.*xla|one_program.*xla|against_float64\[.*(decode|mixed"
    r"|rotated_pages_of_16|-e4m3)",
    "test_paged_cache": r"^(?!.*(exact_and_drops|one_layer))",
    "test_paged_convert": r"worked_example|wrong|message",
    "test_paged_trees": r"float64.*xla-alibi|refus|dense_masks.*7",
    "test_parallel_samples": r"copied|or_none",
    "test_prefix_machine": r"^(?!.*10000)",
    "test_primitives": r"\[select-bfloat16-bfloat16|compiled\[(gelu|ldexp|polynomial)\]|multiply_adds|cannot|scalar",
    "test_ragged": r"message|no_tokens|lists_tell|against_each.*triton.*causal_grouped",
    "test_paged_dropout": r"test_pages_drop.*\[16-xla"
    r"|requests_share.*xla|wrong|need|shape",
    "test_paged_eight_bits": r"bit_for_bit.*float32|finite|e4m3-xla|widened|accuracy|wrong",
    "test_paged_stats": r"against_float64\[(xla-(decode|mixed)|decode\])"
    r"|levels.*append.*xla|wrong|no_levels",
    "test_paged_without_softmax": r"ends1-xla|wrong",
    "test_random_keys": r"primitive|threefry",
    "test_random_mods": r"seed|faults",
    "test_ready_masks": r"evaluate|orders|groups_pass|are_documents|rows\[Morton|(Morton, wide|shared prefix)\]",
    "test_ready_scores": r"evaluate|undo",
    "test_return_stats": r"float64\[triton.*-slopes\]|uniform|without_keys|check|explain|few|nothing_is",
    "test_sampling": r"^(?!.*(whatever_is_around|frequencies))",
    "test_selected_blocks": r"dense_mask\[(reference|xla|triton).*grouped|wide|definition.*True-1-0-.32, 32|message",
    "test_block_rows": r"message",
    "test_block_selection_layers": r"once.*nnx|later.*moba",
    "test_serving_faults": r"^(?!.*random_cancellations)",
    "test_serving_constraints": r"guides|without",
    "test_serving_scenarios": r"chain|by the host",
    "test_shared_prefix": r"causal-3-24-xla|wrong|pays|best",
    "test_sinks": r"mixed.*xla|minus.*xla|without_keys.*None|explain|vmap.*xla",
    "test_sharding": r"explicit|shard_map_without",
    "test_sparse_mla": r"float64\[(xla|triton)|out_of_range.*xla|all_keys.*xla|no_keys\[xla|often.*xla"
    r"|message|sizes\[xla-61",
    "test_state": r"worked_example|neutral|associative|message|wrong",
    "test_state_stats": r"rows|wrong",
    "test_streaming_llm": r"wrong|angles_are_exact|longer",
    "test_streaming_llm_engine": r"wrong|beyond",
    "test_train": r"fit|read|there_are|none",
    "test_train_context": r"wrong",
    "test_train_loss": r"24-None|document",
    "test_train_runs": r"wrong|empty|beyond",
    "test_transforms": r"bit_for_bit.*reference",
    "test_vector_mods": r"\[(every|packed|lengths)-xla|rotated-triton|zeros|nothing",
    "test_vector_programs": r"^(?!.*vmap\[(48|32))",
    "test_paged_vector_mods": r"written|messages",
    "test_rope": r"float64\[(B|.*8-True)|transformers|yarn|message",
    "test_layer_config": r"nnx-FlexAttention-whole",
    "test_layer_vector_mods": r"gradients|streaming",
    "test_types": r"wrong|public|\[(causal|bnth_shared_keys|decode)\]",
}

# Cases that differ from others of the table in a formula alone. Full takes them through `triton`, which translates
# mods; `xla` and `reference` call them as JAX functions, and so do the weights of rows.
FORMULAS = {
    "bias_bhqk", "bias_bhwq", "bias_bq", "bias_bqk", "bias_h", "bias_of_product", "bias_q", "both_sides", "clip",
    "distance", "extreme_logits_softcap", "floor_division", "gelu_activation", "gelu_exact", "grouped", "high_blocks",
    "inverse_causal_score", "morton_neighborhood", "neighborhood", "odd_keys", "odd_keys_score", "only_bias",
    "outside_work", "permuted", "polynomial", "prefix", "relative", "relu", "relu_activation",
    "rows_that_see_nothing_mask_mod", "sandwich", "scale_int", "scale_one", "shared_prefix", "sigmoid_everywhere",
    "silu", "sliding_tile", "softplus", "spatial_bias_of_one_graph", "squared", "table_float32", "table_more_keys",
    "table_of_booleans", "take", "temporal_head", "times_bias_q", "trigonometry",
}  # fmt: skip
# Others differ in lists, lengths and sizes: kernels read most of these at run time, and `reference` and the weights of
# rows make dense masks of all lists.
LISTS = {
    "bias_bqk_through_full_blocks", "bias_hqk_by_head", "causal_more_keys", "causal_more_queries", "decode_blocks",
    "decode_lists_by_grouped_head", "decode_mask_mod", "head_size_8",
    "length_blocks", "length_full_blocks", "length_lists_by_head", "length_many_blocks", "length_many_lists_by_head",
    "length_many_shared_keys", "length_of_one", "length_sees_nothing", "length_shared_keys", "long", "narrow_documents",
    "narrow_runs", "offset_by_batch", "one_key", "padding", "shared_keys_bias", "sinks_negative_scale",
    "softcap_length_many_queries", "squared_through_causal_blocks", "table_by_document",
    "tiles_end_before_their_block_of_keys", "tiles_end_before_their_block_of_queries", "window_by_head_grouped",
}  # fmt: skip
OF_FORMULAS = {
    "test_attention_weights": "rows_against_the_oracle",
    "test_backward": r"\[xla-",
    "test_captured_gradients": r"\[xla-",
    "test_compile": "compiles",
    "test_forward": r"\[xla-",
    "test_oracle": "reference_matches",
}
OF_LISTS = {"test_attention_weights", "test_compile", "test_oracle"}

# What no run takes unless it asks for `-m long`, and the short run does not: more cases of what full tests. Where two
# parameters are crossed, full takes each value of either.
LONG = {
    "test_attention_fn": r"linen-(nothing|float|hidden|two batch|other|precision)",
    "test_constraints": r"(texts_match|any_small|beside_con|prefixes_change).*\[bytes|differ\[320",
    "test_deepseek": r"tokens_are_those_of_transformers\[1",
    "test_dispatch": r"tiles_of_the_user_do.*[12]-xla",
    "test_dot_product_attention": r"computes\[.*-(float32-xla|bfloat16-triton-interpret)\]"
    r"|subset\[(query|bias|scale|query_seq_lengths)-triton|subset\[(query-key-value|value-mask|key-key).*-xla"
    r"|additive_masks\[(-inf-xla|hidden1-triton|-10.*xla)",
    "test_engine": r"recomputation\[.'max_step_tokens': 8.\]|others\[sampling1|formulas\[.'(repet|logit)|alone\[3"
    r"|their_requests\[2|dropped\[False",
    "test_engine_speculation": r"accepted_run\[(1|4|6)|speculation\[sampling1|alone\[False|cache\[float16"
    r"|no_token\[14",
    "test_explain": r"paged_cases\[.*-reference",
    "test_generate": r"longrope_beyond.*-3\]|of_any_length\[25|whole\[(dense-5|paged-1)"
    r"|of_transformers\[dense-(?!gemma2|phi3)|end.*decoding\[4",
    "test_kv_lengths": r"lengths\[reference-(?!length_(many_sinks|sigmoid|mask_mod|shared_blocks|dropout)\])",
    "test_latent_layers": r"dtypes\[(float16-nnx|bfloat16-linen)|block_masks\[linen"
    r"|(call|transformers)\[(yarn-nnx|direct_queries-linen)",
    "test_layer_decoding": r"\[(plain|block mask)-.*linen|\[(rotary|alibi).*-nnx"
    r"|\[(reference-nnx|float8.*nnx|int8-linen)",
    "test_layers": r"\[batch[02]-reference|\[batch[13]-xla|\[(module|method)-reference-linen|form\[linen"
    r"|gives\[(reference-linen|xla-nnx)",
    "test_layer_transforms": r"gradients\[(nnx-plain|linen-of)|nnx.*turn\[True",
    "test_mla": r"grid.*(_4096|_2_\d+\])|bfloat16\[(reference|xla-latent_(decode|9|63|window|layers|padding))",
    "test_models": r"greedy_from_dense-(?!gemma3|phi3|deepseek_v3)|greedy_from_pages-(llama|qwen2|qwen3_yarn)"
    r"|whole_sequence\[(deepseek_v2|llama3|llama_linear|qwen2|qwen3_yarn)|dense_attention\[(llama|qwen3_yarn|qwen2|mistral)",
    "test_paged_attention": r"shot\[(xla-(2|14)|triton-interpret-(3|40))",
    "test_paged_convert": r"keys\[xla-16-(none|window|causal)-(none|bias)(?<!causal-bias)(?<!window-none)",
    "test_paged_stats": r"pages_against_float64\[(xla|reference)-(?!.*(decode|empty|group|softcap|extreme|divided"
    r"|pages_of_1\]|norms_of_values|e4m3))|\[reference-(e4m3|divided_(int8|dropout))"
    r"|levels_against.*(window|causal)-reference",
    "test_paged_trees": r"float64\[(reference-(nothing|causal)|xla-softcap)",
    "test_paged_vector_mods": r"before\[(False-reference|True-xla|False-triton-interpret)",
    "test_parallel_samples": r"\[.'page_size': 16|no_token\[13|with_it\[(0-0|0-4|2-1|2-2)"
    r"|in_it\[(1-True|2-False|3-True)",
    "test_ragged": r"(alone|nothing)\[xla-(whole|alibi_by_sequence|softcap|cross_bottom_right|tiny)",
    "test_return_stats": r"hopper_kernels?(_alone)?\[|float64\[(reference|xla)-(alibi_like|bnth|decode_sees|one_key"
    r"|head_sizes_40_16|own_derivative|negative_scale|squared|table|extreme|softcap\]|shared_keys)",
    "test_block_rows": r"mods\[even-(reference|triton)",
    "test_selected_blocks": r"definition\[bfloat16|\[(reference|xla)-selected_(one|without|for_all|more)",
    "test_shared_prefix": r"attention\[((alibi|window|causal-0-0|causal-1-40).*(reference|xla)|.*0-reference)"
    r"|recomputation\[.\]",
    "test_state": r"them\[two-(alibi|documents)|them\[many.*(softcap|causal)",
    "test_state_stats": r"\[(no_sinks-(1|16)-BNTH|sinks-(1-BTNH|4-BNTH|16-BTNH))",
    "test_streaming_llm": r"anew\[\((4, 12\)-\[45|0, 1|4, 100)|embedding\[(half|linear|longrope_short)"
    r"|own\[(12|16)",
    "test_streaming_llm_engine": r"oracle\[.('max_step|'page_size': 16)|bounded\[(False-5|True-16)"
    r"|no_token\[.'num_pages': 9|pages\[20000",
    "test_train": r"bfloat16\[data=8",
    "test_transforms": r"subset\[(q|c|qc)-xla|subset\[(k|qkv|m|kvm)-triton|xla-\w+-eager\]",
    "test_tuning": r"programs_compute\[(alibi|softcap|noop)|to_search\[.*-(64|96|192)",
    "test_types": r"examples_of_docstrings|the_table_of_cases",
    "test_vector_programs": r"vmap\[32-",
}

# Of these tables, full takes a case on one of its implementations, in turns by its name; in all of `TABLES`, whose
# results are shared, on the same one.
TURNS = {
    "test_backward": (r"", ("triton-interpret", "xla")),
    "test_batch_invariance": (r"every_(batch_of_pages|cascade)", ("triton-interpret", "xla")),
    "test_captured_gradients": (r"", ("triton-interpret", "xla")),
    "test_containment": (r"stay_apart", ("triton-interpret", "xla", "reference")),
    "test_dot_product_attention": (r"computes", ("triton-interpret", "xla")),
    "test_explain": (r"packed_cases", ("triton-interpret", "xla", "reference")),
    "test_forward": (r"", ("triton-interpret", "xla")),
    "test_kv_lengths": (r"test_lengths", ("triton-interpret", "xla")),
    "test_latent_eight_bits": (r"float64", ("triton-interpret", "xla", "reference")),
    "test_mla": (r"against_float64", ("triton-interpret", "xla", "reference")),
    "test_ragged": (r"alone", ("triton-interpret", "xla")),
    "test_ready_masks": (r"test_attention", ("triton", "xla")),
    "test_return_stats": (r"float64", ("triton-interpret", "xla", "reference")),
    "test_vector_mods": (r"float64", ("triton-interpret", "xla", "reference")),
}
# Of these, full takes one in so many, and at least one of each function. Kernels that are compiled here for a GPU run
# on one with `-m gpu`.
THINNED = {
    "test_attention_weights": (r"rows_against", 3),
    "test_compile": (r"compiles", 6),
    "test_context_parallel": (r"against_float64", 3),
    "test_context_parallel_arguments": (r"one_device", 3),
    "test_engine_speculation": (r"^(?!.*(second_cache|inside|biases)).*\[", 2),
    "test_generate": (r"of_transformers", 2),
    "test_hopper_emulated": (r"results_and", 4),
    "test_oracle": (r"matches_oracle", 4),
    "test_paged_attention": (r"interpreted_against", 4),
    "test_paged_compile": (r"compiles", 4),
    "test_paged_dropout": (r"^(?!.*one_mask).*\[", 2),
    "test_paged_stats": (r"interpreted_against", 2),
    "test_primitive_kernels": (r"compiles", 3),
    "test_random_keys": (r"\[", 2),
    "test_selected_blocks": (r"\[", 2),
    "test_serving_processes": (r"answer_as_one", 2),
    "test_shared_prefix": (r"\[", 2),
    "test_state_stats": (r"gradients", 2),
    "test_streaming_llm": (r"^(?!.*of_its_own).*\[", 2),
    "test_train": (r"every_mesh", 2),
    "test_train_context": (r"of_one_device", 2),
    "test_transforms": (r"^(?!.*(fresh|policies|repeated)).*\[", 2),
}
# Modules that took 15 s and more of the full run: of what is left it takes a third, and at least one of each function.
THIRDS = {
    "test_64_bits", "test_attention_fn", "test_attention_fn_layers", "test_attention_weights", "test_backward",
    "test_batch_invariance", "test_batchable", "test_benchmarks_devices", "test_benchmarks_engine",
    "test_benchmarks_run", "test_benchmarks_streaming", "test_block_mask_algebra",
    "test_block_rows", "test_block_selection_layers", "test_block_states", "test_captured_gradients",
    "test_cascade", "test_compile", "test_constraints", "test_containment", "test_context_parallel",
    "test_context_parallel_arguments", "test_context_parallel_collectives", "test_context_parallel_meshes",
    "test_context_parallel_paged", "test_context_parallel_queries", "test_decode_hopper", "test_deepseek",
    "test_demo", "test_demo_generation", "test_determinism", "test_dot_product_attention",
    "test_dot_product_attention_blocks", "test_dropout", "test_eight_bit_queries", "test_engine",
    "test_engine_eight_bits", "test_engine_invariance", "test_engine_speculation", "test_explain", "test_forward",
    "test_generate",
    "test_hopper_emulated", "test_intervals", "test_kv_lengths", "test_latent_eight_bits", "test_latent_hopper",
    "test_latent_layers", "test_layer_config", "test_layer_decoding", "test_layer_transforms", "test_layers",
    "test_mla", "test_models", "test_paged_attention", "test_paged_compile", "test_paged_convert",
    "test_paged_dropout", "test_paged_eight_bits", "test_paged_stats", "test_paged_trees", "test_paged_vector_mods",
    "test_paged_without_softmax", "test_parallel_samples", "test_primitives", "test_ragged", "test_random_keys",
    "test_random_mods", "test_return_stats", "test_selected_blocks", "test_serving_command",
    "test_serving_processes", "test_sharding", "test_shared_prefix", "test_sinks", "test_sparse_mla", "test_state",
    "test_streaming_llm", "test_streaming_llm_engine", "test_train", "test_train_context", "test_train_runs",
    "test_transforms",
}  # fmt: skip
# But all of these: each parameter is a model of its own.
DISTINCT = "test_models::test_greedy"


def purpose(module: str, name: str, case: str | None) -> str | None:
    """The marker of a test, None for the short run.

    >>> purpose("test_forward", "test_forward[xla-alibi]", "alibi"), purpose("test_masks", "test_causal", None)
    ('full', None)
    """
    is_short = module not in COMPILE | BENCH and re.search(SHORT.get(module, ""), name) is not None
    if is_short and not (case is not None and module in TABLES and case not in CASES):
        return None
    if repeats(module, name, case):
        return "long"
    return "compile" if module in COMPILE else "bench" if module in BENCH else "full"


def left_out(names: Iterable[str]) -> set[str]:
    """Which tests of the full run `THINNED` and `THIRDS` leave out. Names are ``module::function[parameters]``.

    >>> [len(left_out(f"{module}::test_x[xla-{i}]" for i in range(9))) for module in ("test_engine", "test_masks")]
    [5, 0]
    """
    functions = collections.defaultdict(list)
    for name in names:
        module, _, test = name.partition("::")
        function, _, parameters = name.partition("[")
        pattern, of = THINNED.get(module, (r"$^", 1))
        of = of if re.search(pattern, test) else 1
        if module in THIRDS and not function.startswith(DISTINCT):
            of *= 3
        # By parameters alone, so that tests of one case of `TABLES` stay or go together.
        functions[function, of].append((_number(parameters), name))
    kept = lambda of, tests: {x for x in tests if x[0] % of == 0} or {min(tests)}
    return {name for (_, of), tests in functions.items() for _, name in set(tests) - kept(of, tests)}


def _number(text: str) -> int:
    """A number that is the same in each run, which that of `hash` is not."""
    return zlib.crc32(text.encode())


def repeats(module: str, name: str, case: str | None) -> bool:
    """Whether a test repeats others in more cases."""
    if module in OF_FORMULAS and (case in FORMULAS or (module in OF_LISTS and case in LISTS)):
        return re.search(OF_FORMULAS[module], name) is not None
    if module in LONG and re.search(LONG[module], name) is not None:
        return True
    pattern, implementations = TURNS.get(module, (r"$^", ()))
    used = next((x for x in implementations if x in name), None)
    if used is not None and re.search(pattern, name) is not None:
        shared = case is not None and module in TABLES
        key = f"-{case}]" if shared else name.replace(used, "")
        return implementations[_number(key) % len(implementations)] != used
    return False
