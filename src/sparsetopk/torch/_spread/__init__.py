"""A row that is spread over many tensors or many processes."""
