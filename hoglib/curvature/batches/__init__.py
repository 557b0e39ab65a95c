"""What a batch is: its examples, its pieces, and the processes that share it."""
