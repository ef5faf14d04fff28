"""What leaves the machine: a privacy statement, a card, weights, and nothing else."""
