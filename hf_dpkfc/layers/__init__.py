"""Which module is handled how, and the capture of (a, δ) that both streams use."""
