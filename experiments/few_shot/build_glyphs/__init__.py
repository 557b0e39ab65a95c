"""Builds the glyphs from open fonts: ``python -m experiments.few_shot.build_glyphs``."""
