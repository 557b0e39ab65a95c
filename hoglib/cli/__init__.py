"""The command `hoglib`: verify, audit, ops, env, check."""
