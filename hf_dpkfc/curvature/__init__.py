"""The data-free stream: synthetic inputs, Kronecker factors, the preconditioner."""
