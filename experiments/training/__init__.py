"""What the experiments share in their training."""
