"""Which tests run when: each function keeps a test in the full run."""

import doctest

from tests import tiers


def test_examples():
    assert doctest.testmod(tiers) == doctest.TestResults(failed=0, attempted=2)


def test_a_third_holds_each_function_and_all_that_is_distinct():
    names = [f"{module}::test_{i}[{j}]" for module in ("test_engine", "test_masks") for i in range(9) for j in range(i)]
    names += [f"test_models::test_greedy_tokens[{j}]" for j in range(9)]
    out = tiers.left_out(names)
    assert tiers.left_out(reversed(names)) == out
    kept = [name.partition("[")[0] for name in names if name not in out]
    assert {kept.count(f"test_engine::test_{i}") for i in (1, 2, 3)} == {1}
    assert kept.count("test_engine::test_8") == 3
    assert kept.count("test_masks::test_8") == 8
    assert kept.count("test_models::test_greedy_tokens") == 9
