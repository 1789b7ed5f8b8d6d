"""From target and data to a trained head: python -m train."""
