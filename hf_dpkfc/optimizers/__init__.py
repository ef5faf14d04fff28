"""What happens to the noisy mean gradient: post-processing that never sees a record."""
