"""What pruning while training is made of."""
