"""The command line of the experiments."""
