"""Modules in other states: other parameters, saved modes and random numbers."""
