"""A loss over data, summed up batch by batch, and what watches a pass."""
