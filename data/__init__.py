"""Prompts in, token ids with exact loss masks out: reading, splitting, answering, masking, capturing."""
