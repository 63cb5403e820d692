"""Which tests run when: each function keeps a test in the full run."""

import doctest

from tests import tiers


def test_examples():
    assert doctest.testmod(tiers) == doctest.TestResults(failed=0, attempted=2)


def test_a_third_holds_each_function_and_all_that_is_distinct():
    parameters = [f"{name}-{number}" for name in ("xla", "triton-interpret", "reference") for number in range(30)]
    functions = ("test_engine::test_one", "test_engine::test_two", "test_masks::test_x", "test_models::test_greedy")
    names = [f"{function}[{x}]" for function in functions for x in parameters]
    names += [f"test_generate::test_{x}[{x}]" for x in parameters] + ["test_train::test_without_parameters"]
    out = tiers.left_out(names)
    assert tiers.left_out(reversed(names)) == out
    kept = [name.partition("[") for name in names if name not in out]
    one, two, *whole = ([rest for name, _, rest in kept if name == function] for function in functions)
    assert one == two  # the same parameters
    assert 20 <= len(one) <= 40
    assert [len(x) for x in whole] == [90, 90]
    assert sum(name.startswith("test_generate") for name, _, _ in kept) == 90
    assert kept[-1][0] == "test_train::test_without_parameters"
