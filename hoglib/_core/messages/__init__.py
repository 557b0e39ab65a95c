"""What the user gave: is it usable, what does it reach, how is it called, and which line says so."""
