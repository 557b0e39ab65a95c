"""The picture of the graph of a gradient: `hog.graph`, and what it is made of."""
