"""Specs for tests of parts that take one."""

from pallas_kernels.spec import AttentionSpec


def spec_of(**fields) -> AttentionSpec:
    """A dense call of small sizes on a CPU, with some fields set; S is T and Hkv is Hq unless given."""
    plain = {"B": 1, "T": 256, "Hq": 2, "D": 64, "dtype": "bfloat16", "scale": 0.125, "platform": "cpu"} | fields
    sizes = {"S": plain["T"], "Hkv": plain["Hq"], "Dv": plain["D"], "Bkv": plain["B"], "device_kind": ""}
    return AttentionSpec(**(sizes | plain))
