"""The commands `hoglib verify`, `audit` and `graph`."""
