"""Weights in files of others: what their tensors are called there, and which of them are tied."""
