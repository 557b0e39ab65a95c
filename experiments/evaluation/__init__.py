"""Adversarial attacks, and scores of generated samples."""
