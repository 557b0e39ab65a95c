"""The products with curvature matrices that are compared, and their largest eigenvalues."""

from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.benchmarks import kronecker, with_hoglib, with_jax, with_peers, with_torch
from experiments.benchmarks.by_hand_compiled import ROUTES, compiled_by_hand
from experiments.benchmarks.problems import problem
from experiments.benchmarks.workload import Method, Unit, Workload

ALL = ("MLP", "CNN", "TRF")
WHOLE = "hoglib.HessianOperator, whole batch"
on = partial(
    Workload, make=problem, unit=Unit("plain gradients of the same network", with_torch.gradient)
)
ours = partial(Method, ours=True)
plain = partial(ours, column="hoglib")
compiled = partial(ours, compiled=True)
graph = partial(compiled, column="compiled")
curvlinops = partial(Method, column="other", called="curvlinops")
eigenthings = partial(Method, column="other", called="eigenthings")
pyhessian = partial(Method, column="other", called="PyHessian")
# torch's own, the other way round
functional = partial(Method, column="other", called="torch.func")
jax = partial(Method, compiled=True, library="jax", column="jax", called="JAX")
ggn = partial(Method, truth="gauss-newton")
empirical = partial(Method, truth="empirical fisher")
sampled = partial(Method, truth="sampled fisher")
top = partial(Method, truth="eigenvalues")


def both(name: str, make: Callable[..., Any], **options: Any) -> dict[str, Method]:
    """A method of hoglib, and the same as a compiled graph."""
    as_graph = graph(with_hoglib.compiled(make), **options)
    return {name: plain(make, **options), f"{name}, compile=True": as_graph}


KRONECKER = {
    "hoglib.KFACOperator": kronecker.hoglib,
    "hooks by hand": kronecker.by_hand,
    "curvlinops": kronecker.curvlinops,
}

WORKLOADS: dict[str, Workload] = {
    "hvp": on(
        "one Hessian-vector product",
        (*ALL, "MLP-128"),
        {
            **both("hoglib.hvp", with_hoglib.hvp),
            "torch.compile of hoglib.hvp": compiled(with_hoglib.around(with_hoglib.hvp)),
            "reverse-over-reverse by hand": Method(with_torch.double_backward),
            "jvp(grad)": functional(with_torch.jvp_of_grad),
            "torch.autograd.functional.hvp": Method(
                with_torch.autograd_functional, column="other", called="autograd.functional"
            ),
            "curvlinops": curvlinops(with_peers.curvlinops_product()),
            "hessian-eigenthings": eigenthings(with_peers.eigenthings_product),
            "PyHessian": pyhessian(with_peers.pyhessian_product),
            "JAX jit(jvp(grad))": jax(with_jax.jvp_of_grad),
        },
        memory="allocated",
        by_hand="reverse-over-reverse by hand",
        quick=("MLP", "CNN"),
        brief="Hessian-vector product",
    ),
    "compiled": on(
        "one product as a compiled graph",
        ALL,
        {
            "hoglib.hvp, compile=True": compiled(with_hoglib.compiled(with_hoglib.hvp)),
            **{
                f"{route}, compiled by hand": Method(
                    partial(compiled_by_hand, route=route),
                    compiled=True,
                    beside=("hoglib.hvp, compile=True",),
                )
                for route in ROUTES
            },
            "hoglib.hvp": ours(with_hoglib.hvp),
            "hoglib.HessianOperator, graph kept, compile=True": compiled(
                with_hoglib.compiled(with_hoglib.once_more)
            ),
            "hoglib.HessianOperator, graph kept": ours(with_hoglib.once_more),
            "hoglib.ggn_vp, compile=True": compiled(
                with_hoglib.compiled(with_hoglib.gauss_newton), truth="gauss-newton"
            ),
            "hoglib.ggn_vp": ours(with_hoglib.gauss_newton, truth="gauss-newton"),
        },
        by_hand="reverse-over-reverse, compiled by hand",
        memory="resident",
    ),
    "hvps": on(
        "20 products at one point, each, set-up included",
        ALL,
        {
            **both("hoglib.HessianOperator", with_hoglib.products),
            "rebuilt by hand": Method(with_torch.rebuilt, few=True),
            "graph kept by hand": Method(with_torch.graph_kept),
            "torch.func.linearize(grad)": functional(with_torch.linearized),
            "curvlinops": curvlinops(with_peers.curvlinops_products, few=True),
            "hessian-eigenthings": eigenthings(with_peers.eigenthings_products, few=True),
            "JAX jit(linearize(grad))": jax(with_jax.linearized),
        },
        vectors=20,
        per_vector=True,
        by_hand="graph kept by hand",
        quick=("MLP",),
        brief="20 products at one point",
    ),
    "block": on(
        "8 products at once, each",
        ALL,
        {
            **both("hoglib.hvp", with_hoglib.hvp_of_block, called="hvp"),
            **both("hoglib.HessianOperator", with_hoglib.block, called="operator"),
            "graph kept by hand": Method(with_torch.block_of_kept_graph),
            "vmap(jvp(grad))": functional(with_torch.vmapped),
            "curvlinops": curvlinops(with_peers.curvlinops_product()),
            "JAX jit(vmap(jvp(grad)))": jax(with_jax.vmapped),
        },
        vectors=8,
        per_vector=True,
        memory="allocated",
        by_hand="graph kept by hand",
        quick=("MLP",),
        brief="8 products at once",
    ),
    "micro": on(
        "one product, in four micro-batches",
        ALL,
        {
            WHOLE: ours(with_hoglib.whole_batch),
            "hoglib.HessianOperator, micro_batch": ours(with_hoglib.micro_batches, beside=(WHOLE,)),
            "by hand": Method(with_torch.micro_batches, beside=(WHOLE,)),
            "hessian-eigenthings": eigenthings(
                with_peers.eigenthings_micro_batches, beside=(WHOLE,)
            ),
        },
        memory="allocated",
        by_hand="by hand",
    ),
    "ggn": on(
        "one Gauss-Newton product",
        ALL,
        {
            **both("hoglib.ggn_vp", with_hoglib.gauss_newton, truth="gauss-newton"),
            "hoglib.GGNOperator": ggn(
                partial(with_hoglib.one_product, kind="GGNOperator"), ours=True
            ),
            "jvp and vjp by hand": ggn(with_torch.gauss_newton),
            "curvlinops": curvlinops(
                with_peers.curvlinops_product("GGNLinearOperator"), truth="gauss-newton"
            ),
            "hessian-eigenthings": eigenthings(
                with_peers.eigenthings_gauss_newton, truth="gauss-newton"
            ),
            "JAX jit(jvp and vjp)": jax(with_jax.gauss_newton, truth="gauss-newton"),
        },
        by_hand="jvp and vjp by hand",
        quick=("MLP", "CNN"),
        brief="Gauss-Newton product",
    ),
    "fisher": on(
        "one product with a Fisher matrix",
        ("MLP", "CNN"),
        {
            "hoglib.fisher_vp, empirical": empirical(
                partial(with_hoglib.fisher, kind="empirical"), ours=True
            ),
            "jvp and vjp by hand, empirical": empirical(with_torch.empirical_fisher),
            "curvlinops, empirical": empirical(with_peers.curvlinops_product("EFLinearOperator")),
            "hessian-eigenthings, empirical": empirical(with_peers.eigenthings_empirical_fisher),
            "hoglib.fisher_vp, sampled": sampled(partial(with_hoglib.fisher, kind="mc"), ours=True),
            "curvlinops, sampled": sampled(with_peers.curvlinops_product("FisherMCLinearOperator")),
        },
        by_hand="jvp and vjp by hand, empirical",
    ),
    "kfac": on(
        "Kronecker factors and one product with them",
        ALL,
        {
            f"{name}, {kind}": Method(
                partial(make, kind={"sampled": "mc"}.get(kind, kind)),
                ours=make is kronecker.hoglib,
                truth="kronecker" if kind == "exact" else f"{kind} kronecker",
                beside=(f"curvlinops, {kind}",) if make is kronecker.hoglib else (),
            )
            for kind in ("exact", "sampled", "empirical")
            for name, make in KRONECKER.items()
        },
        by_hand="hooks by hand, exact",
    ),
    "eigenvalues": on(
        "five largest eigenvalues of the Hessian",
        ("MLP-128",),
        {
            **both("hoglib.HessianOperator.eigsh", with_hoglib.top_five, truth="eigenvalues"),
            "SciPy, graph kept by hand": top(with_torch.arpack),
            "curvlinops, SciPy": curvlinops(with_peers.curvlinops_top_five, truth="eigenvalues"),
            "hessian-eigenthings": eigenthings(
                with_peers.eigenthings_top_five, truth="eigenvalues"
            ),
            "PyHessian, largest in magnitude": pyhessian(
                with_peers.pyhessian_top_five, truth="eigenvalues by magnitude"
            ),
        },
        by_hand="SciPy, graph kept by hand",
        quick=("MLP-128",),
        brief="five largest eigenvalues",
    ),
}
