"""The tracked state of a training script as JSON and tensors."""
