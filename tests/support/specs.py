"""Specs for tests of parts that take one."""

from jflex.backends.gpu import mosaic_gpu, triton
from pallas_kernels.spec import AttentionSpec, Device, Numerics, Sizes


def spec_of(**fields) -> AttentionSpec:
    """A dense call of small sizes on a CPU, with some fields set; S is T and Hkv is Hq unless given."""
    plain = {"B": 1, "T": 256, "Hq": 2, "D": 64} | fields
    others = {"S": plain["T"], "Hkv": plain["Hq"], "Dv": plain["D"], "Bkv": plain["B"]}
    sizes = Sizes(**{name: (others | plain)[name] for name in Sizes._fields})
    spec = AttentionSpec(sizes=sizes, numerics=Numerics("bfloat16", 0.125), device=Device("cpu", ""))
    return spec.replace(**fields)


def forget_plans() -> None:
    """Plans are pure, so they are cached: a test that changes a table or a rule must forget them before and after."""
    from pallas_kernels.mosaic_gpu.plan import plan as mosaic_plan
    from pallas_kernels.split_kv import plan as paged_plan
    from pallas_kernels.triton.plan import plan as triton_plan
    from pallas_kernels.triton.plan import tangent as tangent_plan

    adapters = mosaic_gpu._plan_dense, mosaic_gpu._plan_split_kv, triton._plan_dense, triton._plan_paged
    for function in (*adapters, mosaic_plan.plan, triton_plan.plan, tangent_plan.plan, paged_plan.plan):
        function.cache_clear()
