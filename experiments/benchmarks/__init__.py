"""Side-by-side timings: interleaved repeats, one torch thread, medians and ratios."""
