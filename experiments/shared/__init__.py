"""What several experiments use: data, networks, training, tables and pictures."""
