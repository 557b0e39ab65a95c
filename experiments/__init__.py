"""The experiments: `python -m experiments fit --config configs/...`."""
