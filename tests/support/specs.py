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
    from pallas_kernels.mosaic_gpu.tangent import plan as mosaic_tangent
    from pallas_kernels.split_kv import plan as paged_plan
    from pallas_kernels.triton.plan import plan as triton_plan
    from pallas_kernels.triton.plan import tangent as tangent_plan

    adapters = mosaic_gpu._plan_dense, mosaic_gpu._plan_tangent, mosaic_gpu._plan_split_kv
    plans = mosaic_plan, mosaic_tangent, triton_plan, tangent_plan, paged_plan
    for function in (*adapters, triton._plan_dense, triton._plan_paged, *(module.plan for module in plans)):
        function.cache_clear()
