"""Checks of arguments, the objects that a callable reaches, and the names that messages use."""
