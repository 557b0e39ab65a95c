"""Thread-local state, lines of the user's code, reads of device values, freed memory, the logger."""
