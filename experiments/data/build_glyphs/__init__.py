"""Builds the glyphs from open fonts: ``python -m experiments.data.build_glyphs``."""
