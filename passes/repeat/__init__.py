"""What repeats from block to block: traced once before AOT autograd, compiled once by Inductor."""
