"""What the packages of hoglib share; not part of the public API. Each room imports those beneath it.

problem      what an algorithm gets of a user's function, and its options, checked

remat        recomputation: intermediate values recomputed in backward; blocks: which, and how they
             are named and compiled
modules      swap: other parameters in a module; state: saving and restoring parameters, modes and
             random numbers; module_kinds: which modules are norms and dropout
numerics     finite_differences: what products are compared with; element_differences: of single
             elements; trust: whether two ways to compute something agree, so that one is trusted;
             factorizations, tolerances
substrate    autograd: gradients that can be differentiated again; gradient_graph: what a value was
             computed from, and by which custom Functions; detachment: where a function leaves the
             graph; fingerprint: whether what a loss depends on has changed; placement: on which
             devices and processes tensors are
messages     validation: is an argument usable; closures: what a callable reaches; module_names:
             what its modules are called; call_errors: which argument a failed call names; files
torch_api    torch_private: every private name of torch, and what goes with it; torch_internals;
             torch_modes: which modes the caller runs in; torch_forward_mode: levels and tangents;
             torch_sharding: FSDP, tensor parallelism, DDP; torch_library: operators; torch_version;
             pytree: which tensors are in a tree; function_watch: which custom Functions are applied
runtime      ambient: what a thread is inside of; source_location: which line of the user's code it
             is; device_reads, logger
"""
