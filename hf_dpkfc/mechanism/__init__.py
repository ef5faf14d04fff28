"""The private stream: Poisson draws, clipped sums, and the only place that draws noise."""
