"""Pure maths on torch tensors."""
