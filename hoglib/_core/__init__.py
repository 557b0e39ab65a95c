"""What the packages of hoglib share; not part of the public API.

One module answers one question: `validation` (is the argument usable?), `pytree` (which tensors are in
it?), `autograd` (gradients that can be differentiated again), `gradient_graph` (what does a graph
hold?), `finite_differences`, `state` (saving and restoring), `closures` (what does a callable reach?),
`swap` (other tensors in a module's places), `torch_internals` (torch's private API), and smaller ones.
"""
