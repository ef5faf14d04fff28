"""Differentially private fine-tuning of Hugging Face models with a data-free K-FAC preconditioner."""
