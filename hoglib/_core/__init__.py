"""Internals that the packages of hoglib share. Each sub-package imports only those listed below it.

problem      a user's function as a pure function of a list of leaves, with its checked options

remat        recomputation: intermediate values recomputed in backward; call: one call of a
             recomputed function, and its runs; blocks: which modules are recomputed; block_parts:
             attention and MLP of a block, recomputed one by one
modules      swap: other parameters in a module; state: saving and restoring parameters, modes and
             random numbers; module_kinds: which modules are norms and dropout
numerics     finite_differences: differences of whole vectors; element_differences: of single
             elements; trust: compares two ways to compute something, and remembers if they agree;
             factorizations: eigensolvers for matrices of low rank; tolerances: by dtype
substrate    autograd: gradients that can be differentiated again; gradient_graph: the leaves and
             custom Functions in a graph; detachment: where a function leaves the graph;
             fingerprint: whether the state of a loss has changed; placement: sharded parameters
messages     validation: checks of arguments; closures: the objects that a callable reaches;
             module_names: their qualified names; call_errors: errors of calls of models and
             criteria; files: with which an interrupted call continues
torch_api    torch_private: every private name of torch that hoglib uses; torch_internals: state
             of torch that its public API does not show; torch_modes: which modes the caller runs
             in; torch_forward_mode: levels and tangents; torch_sharding: FSDP, tensor parallelism,
             DDP; torch_library: operators; torch_version: supported releases; pytree: nested
             containers of tensors; function_watch: which custom Functions are applied;
             mixed_precision: half precision and autocast in composites
runtime      ambient: thread-local state; provided: functions of upper packages that lower ones
             call; source_location: lines of the user's code, for warnings and messages;
             device_reads: reading values of a device without waiting; logger
"""
