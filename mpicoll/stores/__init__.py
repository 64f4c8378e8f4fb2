"""Key-value stores with the interface of torch.distributed."""
