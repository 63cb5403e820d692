"""FlashAttention-4 and FlashInfer compute the problems that they are measured with, where they are installed."""

import functools

import pytest

from benchmarks.peers.table import PEERS, by_library
from benchmarks.problems import Problem, square
from benchmarks.variants import CAP

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
VARIANTS = ("noop", "causal", "softcap", "sliding_window", "document_mask", "corpus_mask")
DENSE = [square(2, 256, (4, 2), 64, variant) for variant in VARIANTS]
SERVED = [
    Problem(3, 1, 200, 8, 2, 128, "noop", page=16, lengths="uniform"),
    Problem(2, 48, 200, 8, 2, 128, "causal", page=64),
    Problem(2, 160, 160, 8, 2, 128, "causal", page=128),
    Problem(3, 48, 200, 8, 2, 128, "causal", page=16, lengths="mixed"),
    Problem(3, 1, 160, 8, 2, 128, "noop", page=16, prefix=128),
    Problem(2, 2, 200, 16, 1, 576, "causal", Dv=512, page=64, keys="latent"),
]
CASES = [(peer, problem) for problem in SERVED for peer in by_library(problem, tuple(PEERS.values()))["torch"]]


def attention(problem: Problem, mask, query, key, value):
    """Of queries [T, Hq, D] and keys [S, Hkv, D], which end together, in float32."""
    key, value = (x.float().repeat_interleave(problem.Hq // problem.Hkv, 1) for x in (key, value))
    scale = (192 if problem.keys == "latent" else problem.D) ** -0.5
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    scores = CAP * torch.tanh(scores / CAP) if problem.variant == "softcap" else scores
    q_idx, kv_idx = (torch.arange(n, device=key.device) for n in scores.shape[1:])
    if mask is not None:
        visible = mask(0, 0, q_idx[:, None] + len(kv_idx) - len(q_idx), kv_idx)
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def assert_close(out, expected) -> None:
    out = out.detach().float().reshape(expected.shape)
    assert float((out - expected.detach()).norm() / expected.detach().norm()) < 0.02


@pytest.mark.parametrize("problem", DENSE, ids=lambda x: x.variant)
def test_flash_attention_computes_the_problem_and_its_gradient(problem: Problem):
    pytest.importorskip("flash_attn.cute")
    from benchmarks.peers.torch import attention as peers

    bound, draw = peers.bind(problem, "cuda"), functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    arrays = [draw(problem.B, heads, problem.S, problem.D) for heads in (problem.Hq, problem.Hkv, problem.Hkv)]
    leaves = [x.requires_grad_() for x in peers.arranged("fa4", problem, arrays)]
    out = peers.attention("fa4", bound)(*leaves)
    ours = [x.transpose(1, 2).requires_grad_() for x in arrays]
    expected = torch.stack([attention(problem, bound.mods.mask, *x) for x in zip(*ours, strict=True)])
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(expected, ours, cotangent.reshape(expected.shape).float())
    for x, y in zip((out, *torch.autograd.grad(out, leaves, cotangent)), (expected, *gradients), strict=True):
        assert_close(x, y.float())


@pytest.mark.parametrize(("peer", "problem"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_peer_computes_attention_over_pages(peer: str, problem: Problem):
    pytest.importorskip({"fa4": "flash_attn.cute"}.get(peer, "flashinfer"))
    from benchmarks.peers.torch.attention import bind, paged_attention
    from benchmarks.peers.torch.pages import pages_of

    pages, mask = pages_of(problem, "cuda"), bind(problem, "cuda").mods.mask
    queries = pages.query.split(pages.requests.queries.tolist())
    expected = []
    for query, table, count in zip(queries, pages.put(pages.table).long(), pages.requests.keys, strict=True):
        key, value = (x[table].flatten(0, 1)[:count] for x in (pages.keys, pages.values))
        expected.append(attention(problem, mask, query, key, value))
    with torch.no_grad():
        assert_close(paged_attention(peer, problem, pages)(), torch.cat(expected))
