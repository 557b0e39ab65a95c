"""Datamodules, and the small data sets that come with them."""
