"""Pictures of the experiments, all in the style of `experiments.plots.style`."""
