"""Key-value stores as torch.distributed has them."""
