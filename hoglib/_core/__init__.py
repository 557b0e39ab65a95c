"""Internals that the packages of hoglib share. Each sub-package imports only those listed below it.

problem      a user's function as a pure function of a list of leaves, with its checked options

remat        recomputation: intermediate values recomputed in backward; call: one call of a
             recomputed function, and its runs; blocks: the modules to recompute; block_parts:
             attention and MLP of a block, recomputed one by one
modules      swap: exchanges the parameters of a module; state: saves and restores parameters, modes
             and random numbers; module_kinds: classes of norms and dropout
numerics     finite_differences: differences of whole vectors; element_differences: of single
             elements; trust: compares two computations of one result, and remembers if they agree;
             factorizations: eigensolvers for matrices of low rank; tolerances: by dtype
substrate    autograd: gradients that can be differentiated again; gradient_graph: the leaves and
             custom Functions in a graph; detachment: where a function leaves the graph;
             fingerprint: whether the state of a loss has changed; placement: sharded parameters
messages     validation: checks of arguments; closures: the objects that a callable reaches;
             module_names: their qualified names; call_errors: errors of calls of models and
             criteria; files: an interrupted call continues from these
torch_api    torch_private: every private name of torch that hoglib uses; torch_internals: state
             of torch that its public API does not show; torch_modes: modes around the caller;
             torch_forward_mode: levels and tangents; torch_sharding: FSDP, tensor parallelism,
             DDP; torch_library: operators; torch_version: supported releases; pytree: nested
             containers of tensors; function_watch: sees applications of custom Functions;
             mixed_precision: half precision and autocast in composites
runtime      ambient: thread-local state; provided: functions of upper packages that lower ones
             call; source_location: lines of the user's code, for warnings and messages;
             device_reads: reading values of a device without waiting; logger
"""
