"""What runs inside one chip. A package and not a bare folder: else Hugging Face's `kernels` would win."""
