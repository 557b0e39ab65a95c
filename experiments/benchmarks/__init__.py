"""Side-by-side measurements; each module is a program of its own."""
