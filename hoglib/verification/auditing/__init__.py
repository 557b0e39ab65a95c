"""The audit of a whole loss: `hog.audit`, and what it is made of."""
