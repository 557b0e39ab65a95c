"""The command `hoglib`: verify, audit, graph, ops, env, check."""
