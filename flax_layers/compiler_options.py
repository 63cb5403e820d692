"""Options of XLA for programs that generate."""

DECODING: dict[str, str] = {
    "xla_disable_hlo_passes": "dot-strength-reduction,rematerialization",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""`compiler_options` of `jax.jit` for decoding steps. A CPU ignores them.

On a GPU, XLA replaces the GEMM of one row and a small matrix by a multiplication, which it writes to memory, and a sum:
with the shape of Llama 3 8B the projections to keys and values, 4096 x 1024, but not those of 4096 x 4096. A decoding
step at batch 1 takes 6.5 ms so, and 5.2 ms without the pass (H200, JAX 0.11.2). Kernels that do not depend on one
another overlap in a CUDA graph that is concurrent: 4.26 ms a step, and 4.30 without.

Rematerialization counts a donated cache twice, as argument and as result, and computes again what it need not: of the
same shape, a step of 512 requests beside a cache of 43 GB has 454 fusions and one write of pages twice, and 364 without
the pass (compiled for an H200). No gain was timed: 256 clients got 5.98k to 6.03k tokens/s with the pass, and 5.91k
without it, in other sessions.
"""

PROMPTS: dict[str, str] = {"xla_gpu_graph_min_graph_size": "1000000000"}
"""`compiler_options` of `jax.jit` for whole prompts, which launch kernel by kernel.

XLA builds a CUDA graph before the first kernel starts, and again for caches at other addresses, as each prompt has
them; its kernels are long enough for the next one to be launched meanwhile. Llama 3 8B, 1,024 tokens, from the call to
the first token on the host: 23.1 ms, and 22.8 to 24.0 with graphs that were built before (H200, JAX 0.11.2).
"""
