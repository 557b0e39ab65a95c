"""What derivatives are compared with, factorizations, and when two numbers agree."""
