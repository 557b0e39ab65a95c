"""What the packages of hoglib share; not part of the public API.

One module for one question:

    validation            is an argument usable?
    pytree                which tensors are in it, and arithmetic on them
    autograd              gradients that can be differentiated again
    gradient_graph        what a value was computed from, and by which custom Functions
    detachment            where a function leaves the graph
    finite_differences    what products are compared with (element_differences: of single elements)
    state                 saving and restoring parameters, modes, random numbers
    closures              what a callable reaches (module_names: what its modules are called;
                          module_kinds: which are norms and dropout)
    fingerprint           whether what a loss depends on has changed
    trust                 whether two ways to compute something agree, so that one is trusted
    swap                  other parameters in a module
    recomputation         intermediate values recomputed in backward
    source_location       which line of the user's code it is
    ambient               what a thread is inside of; torch_modes: which modes the caller runs in
    provided              the functions of upper packages that lower ones call
    problem               what an algorithm gets of a user's function, and its options, checked
    torch_internals       torch's private API (torch_forward_mode: levels and tangents;
                          torch_sharding: FSDP, tensor parallelism, DDP)
    function_watch        which custom Functions are applied
    torch_private         every private name of torch that is used, and what goes with it
    torch_version         which torch it is, and whether it is new enough

The others are smaller, or serve the kernels: tolerances, mixed_precision, logger.
"""
