"""Every workload by name. To add one: an entry here, with methods that are functions of a problem."""

from functools import partial

from experiments.benchmarks import with_hoglib, with_jax, with_peers, with_torch
from experiments.benchmarks.workload import Method, Workload

ALL = ("MLP", "CNN", "TRF")
JAX = "JAX jit(grad)"
JAX_GRADIENT = {JAX: Method(with_jax.gradient, truth="gradient")}
compiled = partial(Method, compiled=True)
ggn = partial(Method, truth="gauss-newton")
empirical = partial(Method, truth="empirical fisher")
sampled = partial(Method, truth="sampled fisher")
top = partial(Method, truth="eigenvalues")

WORKLOADS: dict[str, Workload] = {
    "hvp": Workload(
        "one Hessian-vector product",
        ALL,
        {
            "hoglib.hvp": Method(with_hoglib.hvp, ours=True),
            "reverse-over-reverse by hand": Method(with_torch.double_backward),
            "jvp(grad)": Method(with_torch.jvp_of_grad),
            "torch.autograd.functional.hvp": Method(with_torch.autograd_functional),
            "curvlinops": Method(with_peers.curvlinops_product()),
            "hessian-eigenthings": Method(with_peers.eigenthings_product),
            "PyHessian": Method(with_peers.pyhessian_product),
            **JAX_GRADIENT,
            "JAX jit(jvp(grad))": Method(with_jax.jvp_of_grad, beside=JAX),
        },
        memory=True,
    ),
    "compiled": Workload(
        "one product as a compiled graph",
        ALL,
        {
            "hoglib.hvp, compile=True": compiled(partial(with_hoglib.hvp, compile=True), ours=True),
            **{
                f"{route}, compiled by hand": compiled(
                    partial(with_torch.compiled_by_hand, route=route),
                    beside="hoglib.hvp, compile=True",
                )
                for route in with_torch.ROUTES
            },
            "hoglib.hvp": Method(with_hoglib.hvp, ours=True),
            "hoglib.HessianOperator, once more, compile=True": compiled(
                partial(with_hoglib.once_more, compile=True), ours=True
            ),
            "hoglib.HessianOperator, once more": Method(with_hoglib.once_more, ours=True),
            "hoglib.ggn_vp, compile=True": compiled(
                partial(with_hoglib.gauss_newton, compile=True), truth="gauss-newton", ours=True
            ),
            "hoglib.ggn_vp": ggn(with_hoglib.gauss_newton, ours=True),
        },
        resident=True,
    ),
    "hvps": Workload(
        "20 products at one point, each, set-up included",
        ALL,
        {
            "hoglib.HessianOperator": Method(with_hoglib.products, ours=True),
            "rebuilt by hand": Method(with_torch.rebuilt, few=True),
            "graph kept by hand": Method(with_torch.graph_kept),
            "torch.func.linearize(grad)": Method(with_torch.linearized),
            "curvlinops": Method(with_peers.curvlinops_products, few=True),
            "hessian-eigenthings": Method(with_peers.eigenthings_products, few=True),
            **JAX_GRADIENT,
            "JAX jit(linearize(grad))": Method(with_jax.linearized, beside=JAX),
        },
        vectors=20,
        per_vector=True,
    ),
    "block": Workload(
        "8 products at once, each",
        ALL,
        {
            "hoglib.hvp": Method(with_hoglib.hvp_of_block, ours=True),
            "hoglib.HessianOperator": Method(with_hoglib.block, ours=True),
            "vmap(jvp(grad))": Method(with_torch.vmapped),
            "curvlinops": Method(with_peers.curvlinops_product()),
            **JAX_GRADIENT,
            "JAX jit(vmap(jvp(grad)))": Method(with_jax.vmapped, beside=JAX),
        },
        vectors=8,
        per_vector=True,
        memory=True,
    ),
    "micro": Workload(
        "one product more, in four micro-batches",
        ALL,
        {
            "hoglib.HessianOperator, whole batch": Method(with_hoglib.whole_batch, ours=True),
            "hoglib.HessianOperator, micro_batch": Method(
                with_hoglib.micro_batches,
                ours=True,
                beside="hoglib.HessianOperator, whole batch",
            ),
            "by hand": Method(
                with_torch.micro_batches, beside="hoglib.HessianOperator, whole batch"
            ),
            "hessian-eigenthings": Method(
                with_peers.eigenthings_micro_batches, beside="hoglib.HessianOperator, whole batch"
            ),
        },
        memory=True,
    ),
    "ggn": Workload(
        "one Gauss-Newton product",
        ALL,
        {
            "hoglib.ggn_vp": ggn(with_hoglib.gauss_newton, ours=True),
            "hoglib.GGNOperator": ggn(
                partial(with_hoglib.one_product, kind="GGNOperator"), ours=True
            ),
            "jvp and vjp by hand": ggn(with_torch.gauss_newton),
            "curvlinops": ggn(with_peers.curvlinops_product("GGNLinearOperator")),
            "hessian-eigenthings": ggn(with_peers.eigenthings_gauss_newton),
            **JAX_GRADIENT,
            "JAX jit(jvp and vjp)": ggn(with_jax.gauss_newton, beside=JAX),
        },
    ),
    "fisher": Workload(
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
    ),
    "eigenvalues": Workload(
        "five largest eigenvalues of the Hessian",
        ("MLP-128",),
        {
            "hoglib.HessianOperator.eigsh": top(with_hoglib.top_five, ours=True),
            "SciPy, graph kept by hand": top(with_torch.arpack),
            "curvlinops, SciPy": top(with_peers.curvlinops_top_five),
            "hessian-eigenthings": top(with_peers.eigenthings_top_five),
            "PyHessian, largest in magnitude": Method(
                with_peers.pyhessian_top_five, truth="eigenvalues by magnitude"
            ),
        },
    ),
}
# The distributions of the methods above that are not torch and not hoglib.
PEERS = ["curvlinops-for-pytorch", "hessian-eigenthings", "PyHessian", "jax"]
