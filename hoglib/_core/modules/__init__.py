"""Running modules with other parameters; saving and restoring their state; kinds of modules."""
