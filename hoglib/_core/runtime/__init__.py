"""What a thread is inside of, and where the user's code is: no tensor, no torch."""
